// How a tensor of torch shows itself without torch's headers: by DLPack's exchange functions
// (https://dmlc.github.io/dlpack/latest/c_api.html). Included once by each extension, behind Python.h.
#pragma once

#include <cstdint>
#include <vector>

#include "common.h"

namespace tracehooks {
namespace {

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

int64_t width_of(int64_t flags) { return 12 + (flags & SKETCHED ? SKETCH : 0) + (flags & HISTOGRAM ? BUCKETS : 0); }

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

// How tensors are looked at from now on, and the two types that are; -1 with an exception set, 0 where it is not understood.
int connect_tensors(PyObject *const *capsule_and_types) {
    auto *found = static_cast<const Exchange *>(PyCapsule_GetPointer(capsule_and_types[0], "dlpack_exchange_api"));
    if (!found) return -1;
    for (int i = 0; i < 2; ++i) plain_types[i] = Py_NewRef(capsule_and_types[1 + i]);
    if (found->major == 1 && found->borrow) exchange = found;
    return exchange != nullptr;
}

bool is_plain(PyObject *tensor) {
    PyObject *type = reinterpret_cast<PyObject *>(Py_TYPE(tensor));
    return type == plain_types[0] || type == plain_types[1];
}

// What there is to ask of a tensor whose elements lie in memory as they are and in order: its count, or -1 for others.
int64_t look_at(PyObject *tensor, DLTensor *x, int64_t *dtype) {
    static PyObject *const IS_NEG = PyUnicode_InternFromString("is_neg");
    if (!is_plain(tensor)) return -1;
    if (exchange->borrow(tensor, x)) {
        PyErr_Clear();
        return -1;
    }
    int64_t elements = dense_count(*x);
    *dtype = dtype_of(*x);
    if (elements < 0 || *dtype < 0) return -1;
    Held negative(PyObject_CallMethodObjArgs(tensor, IS_NEG, nullptr));  // a bit that the memory does not show
    if (!negative) PyErr_Clear();
    return negative.get() == Py_False ? elements : -1;
}

// A tensor at which we looked: false for others than such.
struct Look {
    DLTensor x;
    int64_t dtype, elements;
    explicit Look(PyObject *tensor) { elements = look_at(tensor, &x, &dtype); }
    explicit operator bool() const { return elements >= 0; }
    int64_t bytes() const { return elements * (x.bits / 8); }
    char *data() const { return x.data + x.byte_offset; }
};

// The address of `rows` packed rows of this width, null where a tensor is none that holds them.
int64_t *rows_in(PyObject *tensor, int64_t rows, int64_t width) {
    DLTensor out;
    if (reinterpret_cast<PyObject *>(Py_TYPE(tensor)) != plain_types[0]) return nullptr;
    if (exchange->borrow(tensor, &out)) {
        PyErr_Clear();
        return nullptr;
    }
    if (dense_count(out) != rows * width || dtype_of(out) != I64) return nullptr;
    return reinterpret_cast<int64_t *>(out.data + out.byte_offset);
}

}  // namespace
}  // namespace tracehooks
