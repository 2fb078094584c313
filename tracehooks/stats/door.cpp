// The quick way from Python to the kernel, for the many tensors that are measured faster than ctypes is entered. Compiled
// where Python's headers are; without, the plain C interface of cpu.cpp is all there is. No headers of torch: tensors
// show themselves by DLPack's exchange functions (https://dmlc.github.io/dlpack/latest/c_api.html).

#if __has_include(<Python.h>)
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <cstdint>
#include <new>
#include <vector>

#include "native/common.h"

extern "C" int tracehooks_summarize(const void *record);
extern "C" int tracehooks_summarize_many(const void *record);
extern "C" int tracehooks_nonfinite(const void *record);

namespace {

using namespace tracehooks;

struct DLTensor {
    char *data;
    int32_t device, device_id, dimensions;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct Exchange {
    uint32_t major, minor;
    void *older, *others[3];
    int (*borrow)(void *object, DLTensor *out);  // -1 with an exception set where there is nothing to show
};

constexpr int CPU = 1;
constexpr int64_t BRIEF = 1 << 18;     // bytes up to which a call may keep Python's lock
constexpr int64_t PARALLEL = 1 << 20;  // bytes from which on threads are worth waking

const Exchange *exchange = nullptr;
PyObject *plain_types[2] = {};  // tensors of these are what they show: subclasses may be shells around others

int dtype_of(const DLTensor &x) {
    switch (x.code << 8 | x.bits) {
        case 2 << 8 | 32: return F32;
        case 2 << 8 | 64: return F64;
        case 2 << 8 | 16: return F16;
        case 4 << 8 | 16: return BF16;
        case 6 << 8 | 8: return BOOL;
        case 1 << 8 | 8: return U8;
        case 1 << 8 | 16: return U16;
        case 1 << 8 | 32: return U32;
        case 1 << 8 | 64: return U64;
        case 0 << 8 | 8: return I8;
        case 0 << 8 | 16: return I16;
        case 0 << 8 | 32: return I32;
        case 0 << 8 | 64: return I64;
        default: return -1;
    }
}

// Elements of a tensor that lie in this processor's memory one after the other, or -1.
int64_t dense_count(const DLTensor &x) {
    int64_t count = 1;
    for (int32_t i = x.dimensions; i-- > 0; count *= x.shape[i])
        if (x.shape[i] != 1 && x.strides && x.strides[i] != count) return -1;
    return x.device == CPU && x.lanes == 1 && (x.data || !count) ? count : -1;
}

// connect(capsule, types): how tensors are looked at from now on, and the two types that are; whether this is understood.
PyObject *connect(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 3) return PyErr_Format(PyExc_TypeError, "connect(capsule, type, type)");
    auto *found = static_cast<const Exchange *>(PyCapsule_GetPointer(arguments[0], "dlpack_exchange_api"));
    if (!found) return nullptr;
    for (int i = 0; i < 2; ++i) Py_INCREF(arguments[1 + i]), plain_types[i] = arguments[1 + i];
    if (found->major == 1 && found->borrow) exchange = found;
    return PyBool_FromLong(exchange != nullptr);
}

// What there is to ask of a tensor whose elements lie in memory as they are and in order: its count, or -1 for others.
int64_t look_at(PyObject *tensor, DLTensor *x, int64_t *options) {
    PyObject *type = reinterpret_cast<PyObject *>(Py_TYPE(tensor));
    if (type != plain_types[0] && type != plain_types[1]) return -1;
    if (exchange->borrow(tensor, x)) {
        PyErr_Clear();
        return -1;
    }
    int64_t elements = dense_count(*x), dtype = dtype_of(*x);
    if (elements < 0 || dtype < 0) return -1;
    PyObject *negative = PyObject_CallMethod(tensor, "is_neg", nullptr);  // a bit that the memory does not show
    if (!negative) PyErr_Clear();
    bool as_it_is = negative == Py_False;
    Py_XDECREF(negative);
    *options = dtype;
    return as_it_is ? elements : -1;
}

// The address of `rows` packed rows of these flags, null where a tensor is none that holds them.
int64_t *rows_in(PyObject *tensor, int64_t rows, int64_t flags, int64_t *width) {
    DLTensor out;
    *width = 12 + (flags & SKETCHED ? SKETCH : 0) + (flags & HISTOGRAM ? BUCKETS : 0);
    if (reinterpret_cast<PyObject *>(Py_TYPE(tensor)) != plain_types[0]) return nullptr;
    if (exchange->borrow(tensor, &out)) {
        PyErr_Clear();
        return nullptr;
    }
    if (dense_count(out) != rows * *width || dtype_of(out) != I64) return nullptr;
    return reinterpret_cast<int64_t *>(out.data + out.byte_offset);
}

// measure(x, out, flags): writes the packed row of a small tensor; False where x or out is none that it takes.
PyObject *measure(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 3 || !exchange) return PyErr_Format(PyExc_TypeError, "measure(x, out, flags) after connect()");
    long flags = PyLong_AsLong(arguments[2]);
    if (flags == -1 && PyErr_Occurred()) return nullptr;
    DLTensor x;
    int64_t options, width, elements = look_at(arguments[0], &x, &options);
    if (elements < 0 || elements * (x.bits / 8) > BRIEF) Py_RETURN_FALSE;
    int64_t *out = rows_in(arguments[1], 1, flags, &width);
    if (!out) Py_RETURN_FALSE;
    Request request{x.data + x.byte_offset, elements, options | int64_t{flags} << 8, out};
    return PyBool_FromLong(!tracehooks_summarize(&request));
}

// What is known of a tensor that was measured: (weak reference, version, elements, dtype, in order, number, returned).
enum Known { REFERENCE, VERSION, ELEMENTS, DTYPE, IN_ORDER, NUMBER, RETURNED, KNOWN_FIELDS };

// Owns a reference; null after an error.
class Held {
    PyObject *object_;

  public:
    explicit Held(PyObject *object) : object_(object) {}
    Held(const Held &) = delete;
    ~Held() { Py_XDECREF(object_); }
    PyObject *get() const { return object_; }
    PyObject *release() {
        PyObject *object = object_;
        object_ = nullptr;
        return object;
    }
    explicit operator bool() const { return object_; }
};

// Whether what is known tells of this very content: of the same tensor, or of one in order in the same memory.
bool tells_of(PyObject *known, PyObject *tensor, PyObject *version, PyObject *elements, PyObject *dtype) {
    if (PyObject_RichCompareBool(PyTuple_GetItem(known, VERSION), version, Py_EQ) != 1) return false;
    Held measured(PyObject_CallNoArgs(PyTuple_GetItem(known, REFERENCE)));
    if (measured.get() == tensor) return true;
    if (!measured || measured.get() == Py_None || PyTuple_GetItem(known, IN_ORDER) != Py_True) return false;
    Held negative(PyObject_CallMethod(measured.get(), "is_neg", nullptr));
    return negative.get() == Py_False && PyTuple_GetItem(known, DTYPE) == dtype &&
           PyObject_RichCompareBool(PyTuple_GetItem(known, ELEMENTS), elements, Py_EQ) == 1;
}

// once(x, known, row, number, flags, returned): the number of a small tensor's row: that of an earlier row with the same
// content, or `number` after writing one to the address `row`. `known` are Known tuples by the address of their tensors.
// -1 where x is none that it takes.
PyObject *once(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 6 || !exchange) return PyErr_Format(PyExc_TypeError, "once(x, known, row, number, flags, returned)");
    PyObject *x = arguments[0], *known = arguments[1], *number = arguments[3], *returned = arguments[5];
    int64_t row = PyLong_AsLongLong(arguments[2]);
    long flags = PyLong_AsLong(arguments[4]);
    if (PyErr_Occurred()) return nullptr;
    DLTensor seen;
    int64_t options, size = look_at(x, &seen, &options);
    if (size < 0 || size * (seen.bits / 8) > BRIEF) return PyLong_FromLong(-1);
    char *data = seen.data + seen.byte_offset;
    Held version(PyObject_GetAttrString(x, "_version"));  // none in inference mode, where changes are not counted
    if (!version) PyErr_Clear();
    bool may_be_known = version && size > 0;
    Held address(PyLong_FromVoidPtr(data)), elements(PyLong_FromLongLong(size)), dtype(PyObject_GetAttrString(x, "dtype"));
    if (!address || !elements || !dtype) return nullptr;
    PyObject *earlier = may_be_known ? PyDict_GetItemWithError(known, address.get()) : nullptr;
    if (!earlier && PyErr_Occurred()) return nullptr;
    if (earlier && tells_of(earlier, x, version.get(), elements.get(), dtype.get())) {
        number = PyTuple_GetItem(earlier, NUMBER);
        if (returned != Py_True || PyTuple_GetItem(earlier, RETURNED) == Py_True) return Py_NewRef(number);
    } else {
        if (PyErr_Occurred()) return nullptr;
        Request request{data, size, options | int64_t{flags} << 8, reinterpret_cast<int64_t *>(row)};
        if (tracehooks_summarize(&request)) return PyLong_FromLong(-1);
    }
    if (may_be_known) {
        Held reference(PyWeakref_NewRef(x, nullptr));
        Held entry(reference ? PyTuple_Pack(KNOWN_FIELDS, reference.get(), version.get(), elements.get(), dtype.get(),
                                            Py_True, number, returned)
                             : nullptr);
        Held kept(Py_NewRef(number));  // the entry it came from may be the one that is replaced
        if (!entry || PyDict_SetItem(known, address.get(), entry.get())) return nullptr;
        return kept.release();
    }
    return Py_NewRef(number);
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
            DLTensor x;
            int64_t options, elements = look_at(PyList_GetItem(tensors, i), &x, &options);
            if (elements >= 0) {
                int64_t size = elements * (x.bits / 8);
                bytes += size;
                options |= flags << 8 | (size >= PARALLEL ? threads << 32 : 0);
                requests.push_back({x.data + x.byte_offset, elements, options, row});
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
    int64_t width, *out = rows_in(arguments[1], rows, flags, &width);
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
    {"once", fast(once), METH_FASTCALL, nullptr},
    {"measure_many", fast(measure_many), METH_FASTCALL, nullptr},
    {"nonfinite", fast(nonfinite), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_cpu", nullptr, -1, METHODS, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__cpu() { return PyModule_Create(&MODULE); }
#endif
