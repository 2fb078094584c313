// Tensors on their way into rows: none is measured twice, each has the head of its site.
#pragma once

#include "objects.h"

namespace tracehooks {
namespace {

// Gives Python's lock away, until the end of a scope.
class Unlocked {
    PyThreadState *state_;

  public:
    Unlocked() : state_(PyEval_SaveThread()) {}
    Unlocked(const Unlocked &) = delete;
    ~Unlocked() { PyEval_RestoreThread(state_); }
};

// Calls the kernel, without Python's lock where it takes a while.
int called(Entry entry, const void *record, int64_t bytes) {
    if (bytes <= BRIEF) return entry(record);
    Unlocked meanwhile;
    return entry(record);
}

Request request_for(const Lane *lane, const Look &look, int64_t *out, const void *before = nullptr) {
    int64_t threads = look.bytes() >= PARALLEL ? int64_t{lane->threads} << 32 : 0;
    return {look.data(), look.elements, look.dtype | int64_t{lane->flags} << 8 | threads, out, before};
}

// The head of a tensor's row at a site: the one that the last such tensor had, or what Python makes. A new reference.
PyObject *head_of(Site *site, PyObject *tensor, const Look &look, char training) {
    const DLTensor &x = look.x;
    bool same = site->known && site->dtype == look.dtype && site->training == training && site->dimensions == x.dimensions;
    for (int i = 0; same && i < x.dimensions; ++i) same = site->shape[i] == x.shape[i];
    if (same) return Py_NewRef(site->known);
    PyObject *head = PyObject_CallMethodObjArgs(object(site), names[HEAD], tensor,
                                                training ? Py_True : Py_False, nullptr);
    if (!head) return nullptr;
    exchange_for(site->known, head);
    site->dtype = static_cast<int>(look.dtype), site->training = training;
    site->dimensions = x.dimensions <= 8 ? x.dimensions : -1;
    for (int i = 0; i < site->dimensions; ++i) site->shape[i] = x.shape[i];
    return Py_NewRef(head);
}

// The version of a tensor's storage; -1 in inference mode, where changes are not counted.
int64_t version_of(PyObject *tensor) {
    Held version(PyObject_GetAttr(tensor, names[VERSION]));
    int64_t number = version ? PyLong_AsLongLong(version.get()) : -1;
    if (number < 0) PyErr_Clear();
    return number;
}

void note_finite(Lane *lane, const int64_t *row) { lane->finite = lane->finite && !(row[1] | row[2] | row[3]); }

// Whether what is known tells of this very content: of the same tensor, or of one in order in the same memory.
bool tells_of(const Measured &known, const Look &look, int64_t version) {
    if (known.version != version || known.elements != look.elements || known.dtype != look.dtype) return false;
    Held measured(PyObject_CallNoArgs(known.reference));
    return measured && measured.get() != Py_None;
}

void forget_measured(Lane *lane) {
    std::unordered_map<char *, Measured> measured;
    measured.swap(lane->rows->measured);
    for (auto &known : measured) Py_DECREF(known.second.reference);
}

// The number of a tensor's packed row: that of an earlier one with the same content, or a new one. -1 with an exception.
int64_t number_of(Lane *lane, PyObject *tensor, const Look &look, bool returned) {
    Rows &rows = *lane->rows;
    int64_t version = look.elements ? version_of(tensor) : -1;
    if (version >= 0) {
        auto known = rows.measured.find(look.data());
        if (known != rows.measured.end() && tells_of(known->second, look, version)) {
            known->second.returned |= returned;
            return known->second.number;
        }
    }
    int64_t packed[12 + SKETCH + BUCKETS];  // not among the others yet: they may move while Python's lock is given away
    Request request = request_for(lane, look, packed);
    if (called(summarize, &request, look.bytes())) {
        PyErr_NoMemory();
        return -1;
    }
    note_finite(lane, packed);
    int64_t number = static_cast<int64_t>(rows.packed.size()) / lane->width;
    rows.packed.insert(rows.packed.end(), packed, packed + lane->width);
    if (version >= 0) {
        Held reference(PyWeakref_NewRef(tensor, nullptr));
        if (!reference) return -1;
        Measured &place = rows.measured[look.data()];
        PyObject *before = place.reference;
        place = {reference.release(), version, look.elements, number, look.dtype, returned};
        Py_XDECREF(before);
    }
    return number;
}

// Whether all went well; false with an exception set.
bool add_row(Lane *lane, PyObject *head, int64_t number) {
    std::vector<Row> &all = lane->rows->all;
    all.push_back({lane->step, now(true), lane->coming, number});
    if (PyList_Append(lane->heads, head)) {
        all.pop_back();
        return false;
    }
    ++lane->coming;
    return true;
}

// A row of a tensor at a site. Whether all went well; false with an exception set.
bool take_row(Lane *lane, PyObject *tensor, const Look &look, Site *site) {
    int64_t number = number_of(lane, tensor, look, site->returned);
    if (number < 0) return false;
    Held head(head_of(site, tensor, look, lane->training));
    return head && add_row(lane, head.get(), number);
}

// Many tensors, measured in one call of the kernel.
struct Asked {
    std::vector<Request> requests;
    int64_t bytes = 0;
    Held heads{PyList_New(0)};

    // One more. Whether all went well; false with an exception set. Its row says dtype and shape of `shown`.
    bool add(Lane *lane, const Look &look, const void *before, PyObject *shown, const Look &like, PyObject *site) {
        if (!PyObject_TypeCheck(site, site_type)) {
            PyErr_Format(PyExc_TypeError, "%R is no site", site);
            return false;
        }
        Held head(head_of(reinterpret_cast<Site *>(site), shown, like, lane->training));
        bytes += look.bytes();
        requests.push_back(request_for(lane, look, nullptr, before));
        return head && !PyList_Append(heads.get(), head.get());
    }

    // Measures them and adds their rows: True.
    PyObject *answered(Lane *lane) {
        int64_t width = lane->width, length = static_cast<int64_t>(requests.size());
        std::vector<int64_t> packed(static_cast<size_t>(length * width));
        for (int64_t i = 0; i < length; ++i) requests[static_cast<size_t>(i)].out = packed.data() + i * width;
        ManyRequest all{requests.data(), length, bytes >= PARALLEL ? lane->threads : 1};
        if (called(summarize_many, &all, bytes)) return PyErr_NoMemory();
        std::vector<int64_t> &rows = lane->rows->packed;
        int64_t number = static_cast<int64_t>(rows.size()) / width;
        rows.insert(rows.end(), packed.begin(), packed.end());
        for (int64_t i = 0; i < length; ++i) {
            note_finite(lane, packed.data() + i * width);
            if (!add_row(lane, PyList_GetItem(heads.get(), static_cast<Py_ssize_t>(i)), number + i)) return nullptr;
        }
        Py_RETURN_TRUE;
    }
};

}  // namespace
}  // namespace tracehooks
