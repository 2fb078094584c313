// The quick way from Python to the kernel, for the many tensors that are measured faster than ctypes is entered. Compiled
// where Python's headers are; without, the plain C interface of cpu.cpp is all there is.

#if __has_include(<Python.h>)
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <cstdint>
#include <new>
#include <vector>

#include "native/tensors.h"

extern "C" int tracehooks_summarize(const void *record);
extern "C" int tracehooks_summarize_many(const void *record);
extern "C" int tracehooks_nonfinite(const void *record);

namespace {

using namespace tracehooks;

// connect(capsule, types): how tensors are looked at from now on, and the two types that are; whether this is understood.
PyObject *connect(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 3) return PyErr_Format(PyExc_TypeError, "connect(capsule, type, type)");
    int understood = connect_tensors(arguments);
    return understood < 0 ? nullptr : PyBool_FromLong(understood);
}

// measure(x, out, flags): writes the packed row of a small tensor; False where x or out is none that it takes.
PyObject *measure(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 3 || !exchange) return PyErr_Format(PyExc_TypeError, "measure(x, out, flags) after connect()");
    long flags = PyLong_AsLong(arguments[2]);
    if (flags == -1 && PyErr_Occurred()) return nullptr;
    Look look(arguments[0]);
    if (!look || look.bytes() > BRIEF) Py_RETURN_FALSE;
    int64_t *out = rows_in(arguments[1], 1, width_of(flags));
    if (!out) Py_RETURN_FALSE;
    Request request{look.data(), look.elements, look.dtype | int64_t{flags} << 8, out, nullptr};
    return PyBool_FromLong(!tracehooks_summarize(&request));
}

// What a call asks of many tensors, and the numbers of those that are not looked at.
struct Asked {
    std::vector<Request> requests;
    int64_t bytes = 0;
    PyObject *others = PyList_New(0);

    ~Asked() { Py_XDECREF(others); }

    // Whether all went well; a Python exception is set where not. Row i is the tensor's of that number.
    bool take(PyObject *tensors, int64_t flags, int64_t threads, int64_t *row, int64_t width) {
        Py_ssize_t count = PyList_Size(tensors);
        if (!others || count < 0) return false;
        requests.reserve(static_cast<size_t>(count));
        for (Py_ssize_t i = 0; i < count; ++i, row += width) {
            Look look(PyList_GetItem(tensors, i));
            if (look) {
                bytes += look.bytes();
                int64_t options = look.dtype | flags << 8 | (look.bytes() >= PARALLEL ? threads << 32 : 0);
                requests.push_back({look.data(), look.elements, options, row, nullptr});
            } else {
                PyObject *number = PyLong_FromSsize_t(i);
                bool added = number && !PyList_Append(others, number);
                Py_XDECREF(number);
                if (!added) return false;
            }
        }
        return true;
    }

    int call(int (*entry)(const void *), int64_t threads) {
        ManyRequest all{requests.data(), static_cast<int64_t>(requests.size()), bytes >= PARALLEL ? threads : 1};
        if (bytes <= BRIEF) return entry(&all);
        PyThreadState *state = PyEval_SaveThread();
        int result = entry(&all);
        PyEval_RestoreThread(state);
        return result;
    }
};

// measure_many(tensors, out, flags, threads): writes the packed rows of the tensors in a list, each its own. The numbers
// of those that it does not take, None where it took none because of `out` or for want of memory.
PyObject *measure_many(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 4 || !exchange) return PyErr_Format(PyExc_TypeError, "measure_many(tensors, out, flags, threads)");
    long flags = PyLong_AsLong(arguments[2]), threads = PyLong_AsLong(arguments[3]);
    Py_ssize_t rows = PyList_Size(arguments[0]);
    if (PyErr_Occurred()) return nullptr;
    int64_t width = width_of(flags), *out = rows_in(arguments[1], rows, width);
    if (!out) Py_RETURN_NONE;
    try {
        Asked asked;
        if (!asked.take(arguments[0], flags, threads, out, width)) return nullptr;
        if (asked.call(tracehooks_summarize_many, threads)) Py_RETURN_NONE;
        Py_INCREF(asked.others);
        return asked.others;
    } catch (const std::bad_alloc &) {
        Py_RETURN_NONE;
    }
}

// nonfinite(tensors, threads): which Kinds the tensors in a list hold together, or -1, and the numbers of those that it
// does not look at.
PyObject *nonfinite(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2 || !exchange) return PyErr_Format(PyExc_TypeError, "nonfinite(tensors, threads)");
    long threads = PyLong_AsLong(arguments[1]);
    if (PyErr_Occurred()) return nullptr;
    try {
        Asked asked;
        if (!asked.take(arguments[0], 0, threads, nullptr, 0)) return nullptr;
        int kinds = asked.call(tracehooks_nonfinite, threads);
        return Py_BuildValue("(iO)", kinds, asked.others);
    } catch (const std::bad_alloc &) {
        return PyErr_NoMemory();
    }
}

PyCFunction fast(PyObject *(*function)(PyObject *, PyObject *const *, Py_ssize_t)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef METHODS[] = {
    {"connect", fast(connect), METH_FASTCALL, nullptr},
    {"measure", fast(measure), METH_FASTCALL, nullptr},
    {"measure_many", fast(measure_many), METH_FASTCALL, nullptr},
    {"nonfinite", fast(nonfinite), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_cpu", nullptr, -1, METHODS, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__cpu() { return PyModule_Create(&MODULE); }
#endif
