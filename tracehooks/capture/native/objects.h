// What the fast lane is made of: its three types, what Python has connected it to, and the way in from Python.
#pragma once

#include <chrono>
#include <exception>
#include <new>
#include <unordered_map>
#include <vector>

#include "../../stats/native/tensors.h"

namespace tracehooks {
namespace {

using Entry = int (*)(const void *record);
Entry summarize, summarize_many, nonfinite;  // of the kernel

// What is asked of torch before a hook may take this lane, and the only answer that lets it.
enum Question { DISPATCH_MODES, FUNCTION_MODES, TRANSFORMS, CAPTURING, BACKWARD, TRACING, QUESTIONS };
constexpr int ASKED_OF_GRADIENTS = BACKWARD;  // a gradient does come in a backward pass
constexpr int ASKED_OF_LISTS = BACKWARD;      // what an optimizer's step reads may be read in one
struct {
    PyObject *ask, *usual;  // ask: null where there is nothing to ask
} questions[QUESTIONS];

enum Name { VERSION, HOOKS, REGISTER, GRAD_FN, REQUIRES_GRAD, SITE, HEAD, OUTPUT, NAMES };
PyObject *names[NAMES], *grad_enabled, *ordered_dict;

unsigned generation = 0;  // of processes: a child after fork is another

// Where a tensor is seen.
struct Site {
    PyObject_HEAD
    PyObject *place, *known;  // the head that this very kind of tensor has here
    int64_t shape[8];
    int dtype, dimensions;
    char training, returned;
};

// A tensor that was measured. While it lives its memory is nobody else's.
struct Measured {
    PyObject *reference;
    int64_t version, elements, number, dtype;
    bool returned;
};

// A tensor whose values were kept, to tell their change.
struct Kept {
    char *data;
    int64_t elements, bytes, dtype;
    size_t place;  // of its values among all that is kept
};

struct Row {
    int64_t step, time, sequence, number;  // number: of its packed row
};

struct Rows {
    std::vector<Row> all;  // as many as there are heads
    std::vector<int64_t> packed;
    std::unordered_map<char *, Measured> measured;
    std::vector<Kept> kept;
    std::vector<char> before;  // the values of all that is kept
};

enum Mode { CLOSED, RECORDING, WATCHING };

struct Lane {
    PyObject_HEAD
    long long step, micro, flags, threads, spent, coming;
    char mode, recording, training, outputs, gradients, reached, finite;
    PyObject *heads, *calls, *hooked, *acquire, *release, *failed, *hook_otherwise, *key;
    PyObject *looked;  // weak reference to the tensor that was watched last
    int64_t looked_version;
    int64_t width;
    unsigned generation;
    Rows *rows;
};

// Where one call of a module is seen.
struct Hooked {
    int64_t call, micro;
    PyObject *site, *gradient;
};

// Of one module's output hook.
struct Seat {
    PyObject_HEAD
    Lane *lane;
    PyObject *hook, *key;
    char root;
    std::vector<Hooked> *entries;
    size_t latest;
};

PyTypeObject *site_type, *lane_type, *seat_type;

template <class T> PyObject *object(T *self) { return reinterpret_cast<PyObject *>(self); }

// Exchanges a reference for another one, which it steals.
void exchange_for(PyObject *&held, PyObject *other) {
    PyObject *before = held;
    held = other;
    Py_XDECREF(before);
}

template <class T> T *allocated(PyTypeObject *type) {
    auto alloc = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    return reinterpret_cast<T *>(alloc(type, 0));
}

void release(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

// What `work` returns, or `failure` with Python's exception set where C++ threw one: none of C++ gets into Python's code.
template <class Result, class Work> Result contained(Result failure, Work work) {
    try {
        return work();
    } catch (const std::bad_alloc &) {
        PyErr_NoMemory();
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return failure;
}

// A function of ours as Python calls it.
template <auto F> struct Entered;
template <class Self, class... Rest, PyObject *(*F)(Self *, Rest...)> struct Entered<F> {
    static PyObject *call(PyObject *self, Rest... rest) {
        return contained<PyObject *>(nullptr, [&] { return F(reinterpret_cast<Self *>(self), rest...); });
    }
};

template <class F> PyCFunction function(F *of_any_signature) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(of_any_signature));
}

template <auto F> PyCFunction method() { return function(Entered<F>::call); }

template <class F> void *slot(F *function) { return reinterpret_cast<void *>(function); }

int64_t now(bool wall) {
    auto since = wall ? std::chrono::system_clock::now().time_since_epoch() : std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

// Whether torch does what it usually does: no modes, no transforms; 0 not, -1 with an exception set.
int usual(int count) {
    for (int i = 0; i < count; ++i) {
        if (!questions[i].ask) continue;
        Held answer(PyObject_CallNoArgs(questions[i].ask));
        if (!answer) return -1;
        if (answer.get() == questions[i].usual) continue;
        int same = PyObject_RichCompareBool(answer.get(), questions[i].usual, Py_EQ);
        if (same <= 0) return same;
    }
    return 1;
}

// ---- sites

// Site(place, returned)
PyObject *site_new(PyTypeObject *type, PyObject *arguments, PyObject *) {
    PyObject *place;
    int returned;
    if (!PyArg_ParseTuple(arguments, "Op", &place, &returned)) return nullptr;
    Site *self = allocated<Site>(type);
    if (!self) return nullptr;
    self->place = Py_NewRef(place), self->returned = static_cast<char>(returned);
    return object(self);
}

int site_traverse(Site *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object(self)));
    Py_VISIT(self->place);
    Py_VISIT(self->known);
    return 0;
}

int site_clear(Site *self) {
    Py_CLEAR(self->place);
    Py_CLEAR(self->known);
    return 0;
}

void site_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    site_clear(reinterpret_cast<Site *>(self));
    release(self);
}

PyMemberDef SITE_MEMBERS[] = {
    {"place", T_OBJECT_EX, offsetof(Site, place), READONLY, nullptr},
    {"returned", T_BOOL, offsetof(Site, returned), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot SITE_SLOTS[] = {
    {Py_tp_new, slot(Entered<site_new>::call)}, {Py_tp_dealloc, slot(site_dealloc)}, {Py_tp_traverse, slot(site_traverse)},
    {Py_tp_clear, slot(site_clear)}, {Py_tp_members, SITE_MEMBERS}, {0, nullptr},
};
PyType_Spec SITE_SPEC = {"tracehooks.capture._lane.Site", sizeof(Site), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, SITE_SLOTS};

}  // namespace
}  // namespace tracehooks
