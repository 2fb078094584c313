// The quick way from Python to the kernel, for the many tensors that are measured faster than ctypes is entered. Compiled
// where Python's headers are; without, the plain C interface of cpu.cpp is all there is. No headers of torch: tensors
// show themselves by DLPack's exchange functions (https://dmlc.github.io/dlpack/latest/c_api.html).

#if __has_include(<Python.h>)
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <cstdint>

#include "native/common.h"

extern "C" int tracehooks_summarize(const void *record);

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
constexpr int64_t BRIEF = 1 << 18;  // bytes up to which a call may keep Python's lock

const Exchange *exchange = nullptr;

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

// connect(capsule): how tensors are looked at from now on; whether this is understood.
PyObject *connect(PyObject *, PyObject *capsule) {
    auto *found = static_cast<const Exchange *>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    if (!found) return nullptr;
    if (found->major == 1 && found->borrow) exchange = found;
    return PyBool_FromLong(exchange != nullptr);
}

// measure(x, out, flags): writes the packed row of a small tensor; False where x or out is none that it takes.
PyObject *measure(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 3 || !exchange) return PyErr_Format(PyExc_TypeError, "measure(x, out, flags) after connect(capsule)");
    DLTensor x, out;
    if (exchange->borrow(arguments[0], &x) || exchange->borrow(arguments[1], &out)) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    long flags = PyLong_AsLong(arguments[2]);
    if (flags == -1 && PyErr_Occurred()) return nullptr;
    int64_t width = 12 + (flags & SKETCHED ? SKETCH : 0) + (flags & HISTOGRAM ? BUCKETS : 0);
    int64_t elements = dense_count(x), dtype = dtype_of(x);
    if (elements < 0 || elements * (x.bits / 8) > BRIEF || dtype < 0) Py_RETURN_FALSE;
    if (dense_count(out) != width || dtype_of(out) != I64) Py_RETURN_FALSE;
    int64_t request[4] = {reinterpret_cast<int64_t>(x.data + x.byte_offset), elements, dtype | int64_t{flags} << 8,
                          reinterpret_cast<int64_t>(out.data + out.byte_offset)};
    return PyBool_FromLong(!tracehooks_summarize(request));
}

PyMethodDef METHODS[] = {
    {"connect", connect, METH_O, nullptr},
    {"measure", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(measure)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_cpu", nullptr, -1, METHODS, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__cpu() { return PyModule_Create(&MODULE); }
#endif
