// The output hook of one module: its rows, and the hooks for the gradients that will reach what it returned.
#pragma once

#include "rows.h"

namespace tracehooks {
namespace {

// Holds the session's lock, if it is free for this thread.
class Locked {
    Lane *lane_;
    int held_;

  public:
    explicit Locked(Lane *lane) : lane_(lane), held_(-1) {
        Held free(PyObject_CallFunctionObjArgs(lane->acquire, Py_False, nullptr));
        if (free) held_ = free.get() == Py_True;
    }
    Locked(const Locked &) = delete;
    ~Locked() {
        if (held_ != 1) return;
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        Held released(PyObject_CallNoArgs(lane_->release));
        if (!released) PyErr_WriteUnraisable(lane_->release);
        PyErr_Restore(type, value, traceback);
    }
    int held() const { return held_; }
};

// One call of a hook: what it found to do, its errors kept away from the run, its time counted.
template <class Work> PyObject *hooked(Lane *lane, const char *where, int asked, Work work) {
    if (lane->generation != generation) Py_RETURN_FALSE;
    int done = usual(asked);
    if (done == 1) {
        int64_t start = now(false);
        Locked lock(lane);
        done = lock.held();
        if (done == 1) done = contained(-1, work);
        if (lane->training) lane->spent += now(false) - start;
    }
    if (done >= 0) return PyBool_FromLong(done);
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;  // an interruption is the user's
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    Held told(PyObject_CallFunction(lane->failed, "sO", where, value));
    Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(traceback);
    if (!told) return nullptr;
    Py_RETURN_TRUE;
}

// Seat(lane, hook, path): whoever has site() says where an output is seen.
PyObject *seat_new(PyTypeObject *type, PyObject *arguments, PyObject *) {
    PyObject *lane, *hook, *path;
    if (!PyArg_ParseTuple(arguments, "O!OU", lane_type, &lane, &hook, &path)) return nullptr;
    Held key(PyTuple_Pack(2, path, Py_False));
    Seat *self = key ? allocated<Seat>(type) : nullptr;
    if (!self) return nullptr;
    self->lane = reinterpret_cast<Lane *>(Py_NewRef(lane)), self->hook = Py_NewRef(hook), self->key = key.release();
    self->root = PyUnicode_GetLength(path) == 0;
    self->entries = new (std::nothrow) std::vector<Hooked>;
    if (self->entries) return object(self);
    Py_DECREF(self);
    return PyErr_NoMemory();
}

int seat_traverse(Seat *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object(self)));
    Py_VISIT(self->lane);
    Py_VISIT(self->hook);
    if (self->entries)
        for (const Hooked &entry : *self->entries) {
            Py_VISIT(entry.site);
            Py_VISIT(entry.gradient);
        }
    return 0;
}

void forget_entries(Seat *self) {
    std::vector<Hooked> entries;
    entries.swap(*self->entries);
    for (const Hooked &entry : entries) Py_XDECREF(entry.site), Py_XDECREF(entry.gradient);
}

int seat_clear(Seat *self) {
    Py_CLEAR(self->lane);
    Py_CLEAR(self->hook);
    if (self->entries) forget_entries(self);
    return 0;
}

void seat_dealloc(PyObject *dying) {
    Seat *self = reinterpret_cast<Seat *>(dying);
    PyObject_GC_UnTrack(dying);
    seat_clear(self);
    Py_XDECREF(self->key);
    delete self->entries;
    release(dying);
}

// Counts this call of the module in the pass: its number, or -1 with an exception set.
int64_t counted(Seat *seat) {
    PyObject *calls = seat->lane->calls, *before = PyDict_GetItemWithError(calls, seat->key);
    if (!before && PyErr_Occurred()) return -1;
    int64_t call = before ? PyLong_AsLongLong(before) : 0;
    Held after(PyLong_FromLongLong(call + 1));
    return after && !PyDict_SetItem(calls, seat->key, after.get()) ? call : -1;
}

// Where this call is seen; null with an exception set.
const Hooked *entry_of(Seat *seat, int64_t call) {
    std::vector<Hooked> &entries = *seat->entries;
    int64_t micro = seat->lane->micro;
    for (size_t i = 0; i < entries.size(); ++i) {
        size_t at = (seat->latest + i) % entries.size();
        if (entries[at].call == call && entries[at].micro == micro) {
            seat->latest = at + 1;  // the next call comes next
            return &entries[at];
        }
    }
    Held where(PyLong_FromLongLong(call)), pass(PyLong_FromLongLong(micro));
    if (!where || !pass) return nullptr;
    Held pair(PyObject_CallMethodObjArgs(seat->hook, names[SITE], names[OUTPUT], where.get(), pass.get(), Py_False, nullptr));
    if (!pair) return nullptr;
    PyObject *site = PyTuple_GetItem(pair.get(), 0), *gradient = site ? PyTuple_GetItem(pair.get(), 1) : nullptr;
    if (!gradient) return nullptr;
    if (!PyObject_TypeCheck(site, site_type)) {
        PyErr_Format(PyExc_TypeError, "%R is no site", site);
        return nullptr;
    }
    constexpr size_t MOST = 512;
    if (entries.size() >= MOST) forget_entries(seat);  // calls without an end: later steps do not come here again
    Hooked &made = entries.emplace_back();
    made = {call, micro, Py_NewRef(site), Py_NewRef(gradient)};
    seat->latest = entries.size();
    return &made;
}

// What Tensor.register_hook does, for a tensor that has no hooks yet and was made by an op. Whether all went well; false
// with an exception set.
bool hook_gradient(Lane *lane, PyObject *tensor, PyObject *hook) {
    Held requires_grad(PyObject_GetAttr(tensor, names[REQUIRES_GRAD]));
    if (!requires_grad) return false;
    if (requires_grad.get() != Py_True) return true;
    Held enabled(PyObject_CallNoArgs(grad_enabled));
    if (!enabled) return false;
    if (enabled.get() != Py_True) return true;
    // reading grad_fn first brings a stale view's node up to date; without it hooking can crash the process
    Held node(PyObject_GetAttr(tensor, names[GRAD_FN])), hooks(node ? PyObject_GetAttr(tensor, names[HOOKS]) : nullptr);
    if (!hooks) return false;
    if (node.get() == Py_None || hooks.get() != Py_None)
        return bool(Held(PyObject_CallFunctionObjArgs(lane->hook_otherwise, tensor, hook, nullptr)));
    Held table(PyObject_CallNoArgs(ordered_dict));
    if (!table || PyObject_SetItem(table.get(), lane->key, hook)) return false;
    if (PyObject_SetAttr(tensor, names[HOOKS], table.get())) return false;
    Held registered(PyObject_CallMethodObjArgs(node.get(), names[REGISTER], tensor, nullptr));
    Held reference(registered ? PyWeakref_NewRef(table.get(), nullptr) : nullptr);
    return reference && !PyList_Append(lane->hooked, reference.get());
}

// The row of what a module returned: 1 done, 0 none that is taken here, -1 with an exception set.
int record_output(Seat *seat, PyObject *output) {
    Lane *lane = seat->lane;
    Look look(output);
    if (!look) return 0;
    int64_t call = counted(seat);
    const Hooked *entry = call < 0 ? nullptr : entry_of(seat, call);
    if (!entry) return -1;
    Held site(Py_NewRef(entry->site)), gradient(Py_NewRef(entry->gradient));
    if (lane->outputs && !take_row(lane, output, look, reinterpret_cast<Site *>(site.get()))) return -1;
    return !lane->gradients || hook_gradient(lane, output, gradient.get()) ? 1 : -1;
}

// Only what is finite: the other is looked at again where findings are made. Answers as above.
int watch_output(Seat *seat, PyObject *output) {
    if (seat->root) return 0;
    Lane *lane = seat->lane;
    Look look(output);
    if (!look) return 0;
    if (look.elements && look.dtype <= F16) {
        int64_t version = version_of(output);
        Held before(lane->looked ? PyObject_CallNoArgs(lane->looked) : Py_NewRef(Py_None));
        if (!before) return -1;
        if (before.get() != output || version < 0 || version != lane->looked_version) {
            Request request = request_for(lane, look, nullptr);
            ManyRequest all{&request, 1, 1};
            if (called(nonfinite, &all, look.bytes())) return 0;
            exchange_for(lane->looked, PyWeakref_NewRef(output, nullptr));
            if (!lane->looked) return -1;
            lane->looked_version = version;
        }
    }
    return counted(seat) < 0 ? -1 : 1;
}

// take(output): a module returned this. False: nothing was done.
PyObject *seat_take(Seat *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 1) return PyErr_Format(PyExc_TypeError, "take(output)");
    PyObject *output = arguments[0];
    Lane *lane = self->lane;
    if (!lane || lane->mode == CLOSED || reinterpret_cast<PyObject *>(Py_TYPE(output)) != plain_types[0]) Py_RETURN_FALSE;
    return hooked(lane, "module_returned", QUESTIONS,
                  [=] { return lane->mode == RECORDING ? record_output(self, output) : watch_output(self, output); });
}

PyMethodDef SEAT_METHODS[] = {{"take", method<seat_take>(), METH_FASTCALL, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyType_Slot SEAT_SLOTS[] = {
    {Py_tp_new, slot(Entered<seat_new>::call)}, {Py_tp_dealloc, slot(seat_dealloc)}, {Py_tp_traverse, slot(seat_traverse)},
    {Py_tp_clear, slot(seat_clear)}, {Py_tp_methods, SEAT_METHODS}, {0, nullptr},
};
PyType_Spec SEAT_SPEC = {"tracehooks.capture._lane.Seat", sizeof(Seat), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                         SEAT_SLOTS};

}  // namespace
}  // namespace tracehooks
