// The fast lane of the hooks: what is usual, and only that, without Python. A hook in Python costs more than measuring a
// small tensor. Everything that is not plain is left, untouched, to the Python that stands behind each call here:
// lane.py says what each of these types does.

#if __has_include(<Python.h>)
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <structmember.h>

#include <cmath>
#include <cstddef>
#include <cstring>

#include "native/seat.h"

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace {

using namespace tracehooks;

// Lane(flags)
PyObject *lane_new(PyTypeObject *type, PyObject *arguments, PyObject *) {
    long long flags;
    if (!PyArg_ParseTuple(arguments, "L", &flags)) return nullptr;
    Lane *self = allocated<Lane>(type);
    if (!self) return nullptr;
    self->flags = flags, self->width = width_of(flags), self->generation = generation;
    self->threads = self->training = self->finite = 1;
    self->heads = PyList_New(0);
    self->rows = new (std::nothrow) Rows;
    if (self->heads && self->rows) return object(self);
    Py_DECREF(self);
    return PyErr_NoMemory();
}

int lane_traverse(Lane *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object(self)));
    for (PyObject *held : {self->heads, self->calls, self->hooked, self->acquire, self->release, self->failed,
                           self->hook_otherwise, self->key, self->looked})
        Py_VISIT(held);
    return 0;
}

int lane_clear(Lane *self) {
    for (PyObject **held : {&self->heads, &self->calls, &self->hooked, &self->acquire, &self->release, &self->failed,
                            &self->hook_otherwise, &self->key, &self->looked})
        Py_CLEAR(*held);
    self->mode = CLOSED, self->recording = 0;
    if (self->rows) forget_measured(self);
    return 0;
}

void lane_dealloc(PyObject *dying) {
    Lane *self = reinterpret_cast<Lane *>(dying);
    PyObject_GC_UnTrack(dying);
    lane_clear(self);
    delete self->rows;
    release(dying);
}

// serve(calls, hooked, lock, failed, hook_otherwise, key): whose hooks take this lane.
PyObject *lane_serve(Lane *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 6 || !PyDict_Check(arguments[0]) || !PyList_Check(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "serve(calls, hooked, lock, failed, hook_otherwise, key)");
    Held acquire(PyObject_GetAttrString(arguments[2], "acquire"));
    Held release(acquire ? PyObject_GetAttrString(arguments[2], "release") : nullptr);
    if (!release) return nullptr;
    exchange_for(self->calls, Py_NewRef(arguments[0]));
    exchange_for(self->hooked, Py_NewRef(arguments[1]));
    exchange_for(self->acquire, acquire.release());
    exchange_for(self->release, release.release());
    exchange_for(self->failed, Py_NewRef(arguments[3]));
    exchange_for(self->hook_otherwise, Py_NewRef(arguments[4]));
    exchange_for(self->key, Py_NewRef(arguments[5]));
    Py_RETURN_NONE;
}

// arrived(site, gradient): False where nothing was done.
PyObject *lane_arrived(Lane *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2 || !PyObject_TypeCheck(arguments[0], site_type)) return PyErr_Format(PyExc_TypeError, "arrived(site, gradient)");
    PyObject *gradient = arguments[1];
    if (!self->recording || !self->reached || reinterpret_cast<PyObject *>(Py_TYPE(gradient)) != plain_types[0])
        Py_RETURN_FALSE;
    return hooked(self, "gradient_arrived", ASKED_OF_GRADIENTS, [=] {
        Look look(gradient);
        return !look ? 0 : take_row(self, gradient, look, reinterpret_cast<Site *>(arguments[0])) ? 1 : -1;
    });
}

// take(x, site): False where nothing was done.
PyObject *lane_take(Lane *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2 || !PyObject_TypeCheck(arguments[1], site_type)) return PyErr_Format(PyExc_TypeError, "take(x, site)");
    Look look(arguments[0]);
    if (!look) Py_RETURN_FALSE;
    if (!take_row(self, arguments[0], look, reinterpret_cast<Site *>(arguments[1]))) return nullptr;
    Py_RETURN_TRUE;
}

// take_many(tensors, sites, shown): all of them in one call of the kernel, or False where nothing was done.
PyObject *lane_take_many(Lane *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 3 || !PyList_Check(arguments[0]) || !PyList_Check(arguments[1]) || !PyList_Check(arguments[2]))
        return PyErr_Format(PyExc_TypeError, "take_many(list of tensors, list of sites, list of tensors)");
    Py_ssize_t length = PyList_Size(arguments[0]);
    if (PyList_Size(arguments[1]) != length || PyList_Size(arguments[2]) != length)
        return PyErr_Format(PyExc_ValueError, "take_many: lists of different lengths");
    int quiet = usual(ASKED_OF_LISTS);
    if (quiet <= 0) return quiet ? nullptr : Py_NewRef(Py_False);
    Asked asked;
    if (!asked.heads) return nullptr;
    for (Py_ssize_t i = 0; i < length; ++i) {
        PyObject *tensor = PyList_GetItem(arguments[0], i), *shown = PyList_GetItem(arguments[2], i);
        Look look(tensor), like = shown == tensor ? look : Look(shown);
        if (!look || !like) Py_RETURN_FALSE;
        if (!asked.add(self, look, nullptr, shown, like, PyList_GetItem(arguments[1], i))) return nullptr;
    }
    return asked.answered(self);
}

// keep(tensors): their values until take_changes(). False where nothing was done.
PyObject *lane_keep(Lane *self, PyObject *tensors) {
    if (!PyList_Check(tensors)) return PyErr_Format(PyExc_TypeError, "keep(list of tensors)");
    constexpr size_t APART = 64;  // no tensor's values begin where its type may not
    self->rows->kept.clear();
    int quiet = usual(ASKED_OF_LISTS);
    if (quiet <= 0) return quiet ? nullptr : Py_NewRef(Py_False);
    std::vector<Kept> kept;
    size_t total = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(tensors); ++i) {
        Look look(PyList_GetItem(tensors, i));
        if (!look || look.dtype > F16) Py_RETURN_FALSE;
        kept.push_back({look.data(), look.elements, look.bytes(), look.dtype, total});
        total += (static_cast<size_t>(look.bytes()) + APART - 1) / APART * APART;
    }
    self->rows->before.resize(total);
    self->rows->kept.swap(kept);
    called([](const void *rows_of) {
        Rows &rows = *const_cast<Rows *>(static_cast<const Rows *>(rows_of));
        for (const Kept &one : rows.kept)
            if (one.bytes) std::memcpy(rows.before.data() + one.place, one.data, static_cast<size_t>(one.bytes));
        return 0;
    }, self->rows, static_cast<int64_t>(total));
    Py_RETURN_TRUE;
}

// take_changes(tensors, sites): rows of what became of the tensors that were kept, in their order. One whose memory is
// another by now has none.
PyObject *lane_take_changes(Lane *self, PyObject *const *arguments, Py_ssize_t count) {
    std::vector<Kept> kept;
    kept.swap(self->rows->kept);
    Py_ssize_t length = static_cast<Py_ssize_t>(kept.size());
    if (count != 2 || !PyList_Check(arguments[0]) || !PyList_Check(arguments[1]) || PyList_Size(arguments[0]) != length ||
        PyList_Size(arguments[1]) != length)
        return PyErr_Format(PyExc_TypeError, "take_changes(tensors that were kept, list of as many sites)");
    Asked asked;
    if (!asked.heads) return nullptr;
    for (Py_ssize_t i = 0; i < length; ++i) {
        PyObject *tensor = PyList_GetItem(arguments[0], i);
        const Kept &one = kept[static_cast<size_t>(i)];
        Look look(tensor);
        if (look.elements != one.elements || look.dtype != one.dtype || look.data() != one.data) continue;
        const char *before = self->rows->before.data() + one.place;
        if (!asked.add(self, look, before, tensor, look, PyList_GetItem(arguments[1], i))) return nullptr;
    }
    Held done(asked.answered(self));
    if (!done) return nullptr;
    Py_RETURN_NONE;
}

// norm(tensors): L2 norm over floating-point tensors, None where one is not plain, or not finite.
PyObject *lane_norm(Lane *self, PyObject *tensors) {
    if (!PyList_Check(tensors)) return PyErr_Format(PyExc_TypeError, "norm(list of tensors)");
    int quiet = usual(ASKED_OF_LISTS);
    if (quiet <= 0) return quiet ? nullptr : Py_NewRef(Py_None);
    size_t length = static_cast<size_t>(PyList_Size(tensors)), width = static_cast<size_t>(width_of(0));
    std::vector<int64_t> rows(length * width);
    std::vector<Request> requests;
    int64_t bytes = 0;
    for (size_t i = 0; i < length; ++i) {
        Look look(PyList_GetItem(tensors, static_cast<Py_ssize_t>(i)));
        if (!look || look.dtype > F16) Py_RETURN_NONE;
        bytes += look.bytes();
        int64_t threads = look.bytes() >= PARALLEL ? int64_t{self->threads} << 32 : 0;
        requests.push_back({look.data(), look.elements, look.dtype | threads, rows.data() + i * width, nullptr});
    }
    ManyRequest all{requests.data(), static_cast<int64_t>(length), bytes >= PARALLEL ? self->threads : 1};
    if (called(summarize_many, &all, bytes)) return PyErr_NoMemory();
    double squares = 0;
    for (const int64_t *row = rows.data(); row < rows.data() + rows.size(); row += width) {
        if (row[1] | row[2] | row[3]) Py_RETURN_NONE;
        double rms;
        std::memcpy(&rms, row + 10, sizeof(rms));
        if (row[0]) squares += rms * rms * static_cast<double>(row[0]);
    }
    return PyFloat_FromDouble(std::sqrt(squares));
}

// put(rows): the number of the first of these packed rows, which were measured elsewhere.
PyObject *lane_put(Lane *self, PyObject *rows) {
    Look look(rows);
    if (!look || look.dtype != I64 || !look.elements || look.elements % self->width)
        return PyErr_Format(PyExc_ValueError, "put(rows): rows of %lld int64 numbers each", static_cast<long long>(self->width));
    auto *from = reinterpret_cast<const int64_t *>(look.data()), *end = from + look.elements;
    std::vector<int64_t> &packed = self->rows->packed;
    int64_t number = static_cast<int64_t>(packed.size()) / self->width;
    packed.insert(packed.end(), from, end);
    for (; from < end; from += self->width) note_finite(self, from);
    return PyLong_FromLongLong(number);
}

// add(head, number): a row, now.
PyObject *lane_add(Lane *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "add(head, number)");
    int64_t number = PyLong_AsLongLong(arguments[1]);
    if (PyErr_Occurred() || !add_row(self, arguments[0], number)) return nullptr;
    Py_RETURN_NONE;
}

// next(): the number in the step of what comes now.
PyObject *lane_next(Lane *self, PyObject *) { return PyLong_FromLongLong(self->coming++); }

// begin(step): numbers begin anew.
PyObject *lane_begin(Lane *self, PyObject *step) {
    int64_t number = PyLong_AsLongLong(step);
    if (PyErr_Occurred()) return nullptr;
    self->step = number, self->coming = 0;
    Py_RETURN_NONE;
}

// forget(): what was measured before may have changed unseen.
PyObject *lane_forget(Lane *self, PyObject *) {
    forget_measured(self);
    Py_CLEAR(self->looked);
    Py_RETURN_NONE;
}

// returned(x): whether this tensor, unchanged since, was measured here where a module returned it.
PyObject *lane_returned(Lane *self, PyObject *tensor) {
    Look look(tensor);
    if (look.elements <= 0) Py_RETURN_FALSE;
    auto known = self->rows->measured.find(look.data());
    if (known == self->rows->measured.end() || !known->second.returned) Py_RETURN_FALSE;
    return PyBool_FromLong(tells_of(known->second, look, version_of(tensor)));
}

PyObject *bytes_of(const std::vector<int64_t> &column) {
    auto *bytes = reinterpret_cast<const char *>(column.data());
    return PyByteArray_FromStringAndSize(bytes, static_cast<Py_ssize_t>(column.size() * sizeof(int64_t)));
}

// drain(): heads, and the bytes of int64 columns: steps, times in ns, numbers in the step, numbers of packed rows, packed
// rows. All of it is forgotten.
PyObject *lane_drain(Lane *self, PyObject *) {
    Rows &rows = *self->rows;
    Held result(PyTuple_New(6)), none(PyList_New(0));
    Py_ssize_t place = 0;
    auto put = [&](PyObject *made) { return made && !PyTuple_SetItem(result.get(), place++, made); };
    if (!result || !none || !put(PyList_AsTuple(self->heads))) return nullptr;
    std::vector<int64_t> column(rows.all.size());
    for (auto field : {&Row::step, &Row::time, &Row::sequence, &Row::number}) {
        for (size_t i = 0; i < column.size(); ++i) column[i] = rows.all[i].*field;
        if (!put(bytes_of(column))) return nullptr;
    }
    if (!put(bytes_of(rows.packed))) return nullptr;
    exchange_for(self->heads, none.release());
    rows.all.clear(), rows.packed.clear();
    self->finite = 1;
    forget_measured(self);
    return result.release();
}

Py_ssize_t lane_length(Lane *self) { return static_cast<Py_ssize_t>(self->rows->all.size()); }

PyMemberDef LANE_MEMBERS[] = {
    {"step", T_LONGLONG, offsetof(Lane, step), READONLY, nullptr},
    {"micro", T_LONGLONG, offsetof(Lane, micro), 0, nullptr},
    {"threads", T_LONGLONG, offsetof(Lane, threads), 0, nullptr},
    {"spent", T_LONGLONG, offsetof(Lane, spent), 0, nullptr},
    {"mode", T_BYTE, offsetof(Lane, mode), 0, nullptr},
    {"recording", T_BOOL, offsetof(Lane, recording), 0, nullptr},
    {"training", T_BOOL, offsetof(Lane, training), 0, nullptr},
    {"outputs", T_BOOL, offsetof(Lane, outputs), 0, nullptr},
    {"gradients", T_BOOL, offsetof(Lane, gradients), 0, nullptr},
    {"reached", T_BOOL, offsetof(Lane, reached), 0, nullptr},
    {"finite", T_BOOL, offsetof(Lane, finite), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyMethodDef LANE_METHODS[] = {
    {"serve", method<lane_serve>(), METH_FASTCALL, nullptr},
    {"arrived", method<lane_arrived>(), METH_FASTCALL, nullptr},
    {"take", method<lane_take>(), METH_FASTCALL, nullptr},
    {"take_many", method<lane_take_many>(), METH_FASTCALL, nullptr},
    {"keep", method<lane_keep>(), METH_O, nullptr},
    {"take_changes", method<lane_take_changes>(), METH_FASTCALL, nullptr},
    {"norm", method<lane_norm>(), METH_O, nullptr},
    {"put", method<lane_put>(), METH_O, nullptr},
    {"add", method<lane_add>(), METH_FASTCALL, nullptr},
    {"next", method<lane_next>(), METH_NOARGS, nullptr},
    {"begin", method<lane_begin>(), METH_O, nullptr},
    {"forget", method<lane_forget>(), METH_NOARGS, nullptr},
    {"returned", method<lane_returned>(), METH_O, nullptr},
    {"drain", method<lane_drain>(), METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot LANE_SLOTS[] = {
    {Py_tp_new, slot(Entered<lane_new>::call)}, {Py_tp_dealloc, slot(lane_dealloc)}, {Py_tp_traverse, slot(lane_traverse)},
    {Py_tp_clear, slot(lane_clear)}, {Py_tp_methods, LANE_METHODS}, {Py_tp_members, LANE_MEMBERS},
    {Py_sq_length, slot(lane_length)}, {0, nullptr},
};
PyType_Spec LANE_SPEC = {"tracehooks.capture._lane.Lane", sizeof(Lane), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                         LANE_SLOTS};

// connect(capsule, Tensor, Parameter, entries, questions, names, is_grad_enabled, OrderedDict): the kernel's entries by
// address, questions as (function or None, usual answer), names of torch's attributes. Whether tensors are understood.
PyObject *connect(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 8) return PyErr_Format(PyExc_TypeError, "connect() takes 8 arguments");
    Entry *entries[] = {&summarize, &summarize_many, &nonfinite};
    unsigned long long address[3];
    if (!PyArg_ParseTuple(arguments[3], "KKK", address, address + 1, address + 2)) return nullptr;
    for (int i = 0; i < 3; ++i) *entries[i] = reinterpret_cast<Entry>(static_cast<uintptr_t>(address[i]));
    for (int i = 0; i < QUESTIONS; ++i) {
        PyObject *pair = PyTuple_GetItem(arguments[4], i), *ask = pair ? PyTuple_GetItem(pair, 0) : nullptr;
        PyObject *answer = ask ? PyTuple_GetItem(pair, 1) : nullptr;
        if (!answer) return nullptr;
        questions[i] = {ask == Py_None ? nullptr : Py_NewRef(ask), Py_NewRef(answer)};
    }
    for (int i = 0; i < SITE; ++i) {
        PyObject *name = PyTuple_GetItem(arguments[5], i);
        if (!name) return nullptr;
        names[i] = Py_NewRef(name);
    }
    const char *ours[] = {"site", "head", "output"};
    for (int i = SITE; i < NAMES; ++i)
        if (!(names[i] = PyUnicode_InternFromString(ours[i - SITE]))) return nullptr;
    grad_enabled = Py_NewRef(arguments[6]), ordered_dict = Py_NewRef(arguments[7]);
    int understood = connect_tensors(arguments);
    return understood < 0 ? nullptr : PyBool_FromLong(understood);
}

PyMethodDef FUNCTIONS[] = {{"connect", method<connect>(), METH_FASTCALL, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_lane", nullptr, -1, FUNCTIONS, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__lane() {
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, [] { ++generation; });
#endif
    struct {
        PyType_Spec *spec;
        PyTypeObject **type;
        const char *name;
    } types[] = {{&SITE_SPEC, &site_type, "Site"}, {&LANE_SPEC, &lane_type, "Lane"}, {&SEAT_SPEC, &seat_type, "Seat"}};
    Held module(PyModule_Create(&MODULE));
    if (!module || PyModule_AddIntConstant(module.get(), "ABI", ABI)) return nullptr;
    for (auto &one : types) {
        PyObject *made = PyType_FromSpec(one.spec);
        *one.type = reinterpret_cast<PyTypeObject *>(made);
        if (!made || PyModule_AddObjectRef(module.get(), one.name, made)) return nullptr;
    }
    return module.release();
}
#endif
