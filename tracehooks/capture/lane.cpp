// The fast lane of the hooks: what is usual, and only that, without Python. A hook in Python costs more than measuring a
// small tensor. Everything that is not plain is left, untouched, to the Python that stands behind each call here:
// lane.py says what each of these types does.

#if __has_include(<Python.h>)
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <structmember.h>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <new>
#include <unordered_map>
#include <vector>

#include "../stats/native/tensors.h"

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace {

using namespace tracehooks;

// ---- what Python connects: entries of the kernel, and what there is to ask of torch

using Entry = int (*)(const void *record);
Entry summarize, summarize_many, nonfinite;

// What is asked of torch before a hook may take this lane, and the only answer that lets it.
enum Question { DISPATCH_MODES, FUNCTION_MODES, TRANSFORMS, CAPTURING, BACKWARD, TRACING, QUESTIONS };
constexpr int ASKED_OF_GRADIENTS = BACKWARD;  // a gradient does come in a backward pass
struct {
    PyObject *ask, *usual;  // ask: null where there is nothing to ask
} questions[QUESTIONS];

enum Name { VERSION, HOOKS, REGISTER, GRAD_FN, REQUIRES_GRAD, SITE, HEAD, OUTPUT, NAMES };
PyObject *names[NAMES], *grad_enabled, *ordered_dict;

unsigned generation = 0;  // of processes: a child after fork is another

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

// ---- objects that Python makes

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
    int64_t version, elements, number;
    int dtype;
    bool returned;
};

// A tensor whose values were kept, to tell their change.
struct Kept {
    char *data;
    int64_t elements, bytes;
    int dtype;
};

struct Rows {
    std::vector<int64_t> steps, times, sequence, numbers, packed;
    std::unordered_map<char *, Measured> measured;
    std::vector<Kept> kept;
    std::vector<char> before;  // the values of all that is kept, one tensor after the other
};

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
enum Mode { CLOSED, RECORDING, WATCHING };

struct Hooked {
    int64_t call, micro;
    PyObject *site, *gradient;
};

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

// The head of a tensor's row at a site: the one that the last such tensor had, or what Python makes. A new reference.
PyObject *head_of(Site *site, PyObject *tensor, const DLTensor &x, int dtype, char training) {
    bool same = site->known && site->dtype == dtype && site->training == training && site->dimensions == x.dimensions;
    for (int i = 0; same && i < x.dimensions; ++i) same = site->shape[i] == x.shape[i];
    if (same) return Py_NewRef(site->known);
    PyObject *head = PyObject_CallMethodObjArgs(object(site), names[HEAD], tensor,
                                                training ? Py_True : Py_False, nullptr);
    if (!head) return nullptr;
    exchange_for(site->known, head);
    site->dtype = dtype, site->training = training, site->dimensions = x.dimensions <= 8 ? x.dimensions : -1;
    for (int i = 0; i < site->dimensions; ++i) site->shape[i] = x.shape[i];
    return Py_NewRef(head);
}

// ---- measuring

// Calls the kernel, without Python's lock where it takes a while.
int called(Entry entry, const void *record, int64_t bytes) {
    if (bytes <= BRIEF) return entry(record);
    PyThreadState *state = PyEval_SaveThread();
    int result = entry(record);
    PyEval_RestoreThread(state);
    return result;
}

int64_t options_of(const Lane *lane, int64_t dtype, int64_t bytes) {
    return dtype | int64_t{lane->flags} << 8 | (bytes >= PARALLEL ? int64_t{lane->threads} << 32 : 0);
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
bool tells_of(const Measured &known, PyObject *tensor, int64_t version, int64_t elements, int dtype) {
    if (known.version != version || known.elements != elements || known.dtype != dtype) return false;
    Held measured(PyObject_CallNoArgs(known.reference));
    return measured && measured.get() != Py_None;
}

// The number of a tensor's packed row: that of an earlier one with the same content, or a new one. -1 with an exception.
int64_t number_of(Lane *lane, PyObject *tensor, const DLTensor &x, int64_t elements, int dtype, bool returned) {
    Rows &rows = *lane->rows;
    char *data = x.data + x.byte_offset;
    int64_t version = elements ? version_of(tensor) : -1;
    if (version >= 0) {
        auto known = rows.measured.find(data);
        if (known != rows.measured.end() && tells_of(known->second, tensor, version, elements, dtype)) {
            known->second.returned |= returned;
            return known->second.number;
        }
    }
    int64_t bytes = elements * (x.bits / 8), number = static_cast<int64_t>(rows.packed.size()) / lane->width;
    std::vector<int64_t> large;  // others may add rows while Python's lock is given away
    int64_t *row;
    if (bytes > BRIEF) {
        large.resize(static_cast<size_t>(lane->width));
        row = large.data();
    } else {
        rows.packed.resize(rows.packed.size() + static_cast<size_t>(lane->width));
        row = rows.packed.data() + number * lane->width;
    }
    Request request{data, elements, options_of(lane, dtype, bytes), row, nullptr};
    if (called(summarize, &request, bytes)) {
        PyErr_NoMemory();
        return -1;
    }
    note_finite(lane, row);
    if (bytes > BRIEF) {
        number = static_cast<int64_t>(rows.packed.size()) / lane->width;
        rows.packed.insert(rows.packed.end(), large.begin(), large.end());
    }
    if (version >= 0) {
        PyObject *reference = PyWeakref_NewRef(tensor, nullptr);
        if (!reference) return -1;
        Measured &place = rows.measured[data];
        Py_XDECREF(place.reference);
        place = {reference, version, elements, number, dtype, returned};
    }
    return number;
}

bool add_row(Lane *lane, PyObject *head, int64_t number) {
    if (PyList_Append(lane->heads, head)) return false;
    Rows &rows = *lane->rows;
    rows.steps.push_back(lane->step), rows.times.push_back(now(true));
    rows.sequence.push_back(lane->coming++), rows.numbers.push_back(number);
    return true;
}

// A row of a tensor at a site: 1 done, 0 none that is taken here, -1 with an exception set.
int take_row(Lane *lane, PyObject *tensor, Site *site) {
    DLTensor x;
    int64_t dtype, elements = look_at(tensor, &x, &dtype);
    if (elements < 0) return 0;
    int64_t number = number_of(lane, tensor, x, elements, static_cast<int>(dtype), site->returned);
    if (number < 0) return -1;
    Held head(head_of(site, tensor, x, static_cast<int>(dtype), lane->training));
    return head && add_row(lane, head.get(), number) ? 1 : -1;
}

// ---- hooks

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
        if (done == 1) done = work();
        if (lane->training) lane->spent += now(false) - start;
    }
    if (done >= 0) return PyBool_FromLong(done);
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    Held told(PyObject_CallFunction(lane->failed, "sO", where, value));
    Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(traceback);
    if (!told) return nullptr;
    Py_RETURN_TRUE;
}

// Seat(lane, hook, path): of one module's output hook.
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

int seat_clear(Seat *self) {
    Py_CLEAR(self->lane);
    Py_CLEAR(self->hook);
    std::vector<Hooked> entries;
    if (self->entries) entries.swap(*self->entries);
    for (const Hooked &entry : entries) Py_DECREF(entry.site), Py_DECREF(entry.gradient);
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
    PyObject *site = PyTuple_GetItem(pair.get(), 0), *gradient = PyTuple_GetItem(pair.get(), 1);
    if (!site || !gradient) return nullptr;
    constexpr size_t MOST = 512;
    if (entries.size() >= MOST) {  // calls without an end: later steps do not come here again
        for (const Hooked &entry : entries) Py_DECREF(entry.site), Py_DECREF(entry.gradient);
        entries.clear();
    }
    entries.push_back({call, micro, Py_NewRef(site), Py_NewRef(gradient)});
    seat->latest = entries.size();
    return &entries.back();
}

// What Tensor.register_hook does, for a tensor that has no hooks yet and was made by an op.
int hook_gradient(Lane *lane, PyObject *tensor, PyObject *hook) {
    Held requires_grad(PyObject_GetAttr(tensor, names[REQUIRES_GRAD]));
    if (!requires_grad) return -1;
    if (requires_grad.get() != Py_True) return 1;
    Held enabled(PyObject_CallNoArgs(grad_enabled));
    if (!enabled) return -1;
    if (enabled.get() != Py_True) return 1;
    // reading grad_fn first brings a stale view's node up to date; without it hooking can crash the process
    Held node(PyObject_GetAttr(tensor, names[GRAD_FN])), hooks(PyObject_GetAttr(tensor, names[HOOKS]));
    if (!node || !hooks) return -1;
    if (node.get() == Py_None || hooks.get() != Py_None) {
        Held added(PyObject_CallFunctionObjArgs(lane->hook_otherwise, tensor, hook, nullptr));
        return added ? 1 : -1;
    }
    Held table(PyObject_CallNoArgs(ordered_dict));
    if (!table || PyObject_SetItem(table.get(), lane->key, hook)) return -1;
    if (PyObject_SetAttr(tensor, names[HOOKS], table.get())) return -1;
    Held registered(PyObject_CallMethodObjArgs(node.get(), names[REGISTER], tensor, nullptr));
    Held reference(registered ? PyWeakref_NewRef(table.get(), nullptr) : nullptr);
    return reference && !PyList_Append(lane->hooked, reference.get()) ? 1 : -1;
}

int record_output(Seat *seat, PyObject *output) {
    Lane *lane = seat->lane;
    DLTensor x;
    int64_t dtype;
    if (look_at(output, &x, &dtype) < 0) return 0;
    int64_t call = counted(seat);
    const Hooked *entry = call < 0 ? nullptr : entry_of(seat, call);
    if (!entry) return -1;
    Held site(Py_NewRef(entry->site)), gradient(Py_NewRef(entry->gradient));
    if (lane->outputs && take_row(lane, output, reinterpret_cast<Site *>(site.get())) != 1) return -1;
    return lane->gradients ? hook_gradient(lane, output, gradient.get()) : 1;
}

// Only what is finite: the other is looked at again where findings are made.
int watch_output(Seat *seat, PyObject *output) {
    Lane *lane = seat->lane;
    DLTensor x;
    int64_t dtype, elements = seat->root ? -1 : look_at(output, &x, &dtype);
    if (elements < 0) return 0;
    if (elements && dtype <= F16) {
        int64_t version = version_of(output);
        Held before(lane->looked ? PyObject_CallNoArgs(lane->looked) : Py_NewRef(Py_None));
        if (!before) return -1;
        if (before.get() != output || version < 0 || version != lane->looked_version) {
            int64_t bytes = elements * (x.bits / 8);
            Request request{x.data + x.byte_offset, elements, options_of(lane, dtype, bytes), nullptr, nullptr};
            ManyRequest all{&request, 1, 1};
            if (called(nonfinite, &all, bytes)) return 0;
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

// ---- the lane

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

void forget_measured(Lane *lane) {
    std::unordered_map<char *, Measured> measured;
    measured.swap(lane->rows->measured);
    for (auto &known : measured) Py_DECREF(known.second.reference);
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
    Held acquire(PyObject_GetAttrString(arguments[2], "acquire")), release(PyObject_GetAttrString(arguments[2], "release"));
    if (!acquire || !release) return nullptr;
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
    Site *site = reinterpret_cast<Site *>(arguments[0]);
    return hooked(self, "gradient_arrived", ASKED_OF_GRADIENTS, [=] { return take_row(self, gradient, site); });
}

// take(x, site): False where nothing was done.
PyObject *lane_take(Lane *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2 || !PyObject_TypeCheck(arguments[1], site_type)) return PyErr_Format(PyExc_TypeError, "take(x, site)");
    int done = take_row(self, arguments[0], reinterpret_cast<Site *>(arguments[1]));
    return done < 0 ? nullptr : PyBool_FromLong(done);
}

// Many tensors, measured in one call of the kernel.
struct Asked {
    std::vector<Request> requests;
    int64_t bytes = 0;
    Held heads{PyList_New(0)};

    // One more; whether all went well. Its row says dtype and shape of `shown`, which looks like `like`.
    bool add(Lane *lane, const DLTensor &x, int64_t elements, int64_t dtype, const void *before, PyObject *shown,
             const DLTensor &like, int64_t as, PyObject *site) {
        if (!PyObject_TypeCheck(site, site_type)) {
            PyErr_Format(PyExc_TypeError, "%R is no site", site);
            return false;
        }
        Held head(head_of(reinterpret_cast<Site *>(site), shown, like, static_cast<int>(as), lane->training));
        int64_t size = elements * (x.bits / 8);
        bytes += size;
        requests.push_back({x.data + x.byte_offset, elements, options_of(lane, dtype, size), nullptr, before});
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

// take_many(tensors, sites, shown): all of them in one call of the kernel, or False where nothing was done.
PyObject *lane_take_many(Lane *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 3 || !PyList_Check(arguments[0]) || !PyList_Check(arguments[1]) || !PyList_Check(arguments[2]))
        return PyErr_Format(PyExc_TypeError, "take_many(list of tensors, list of sites, list of tensors)");
    Py_ssize_t length = PyList_Size(arguments[0]);
    if (PyList_Size(arguments[1]) != length || PyList_Size(arguments[2]) != length)
        return PyErr_Format(PyExc_ValueError, "take_many: lists of different lengths");
    int quiet = usual(CAPTURING + 1);
    if (quiet <= 0) return quiet ? nullptr : Py_NewRef(Py_False);
    Asked asked;
    if (!asked.heads) return nullptr;
    for (Py_ssize_t i = 0; i < length; ++i) {
        PyObject *tensor = PyList_GetItem(arguments[0], i), *site = PyList_GetItem(arguments[1], i);
        PyObject *shown = PyList_GetItem(arguments[2], i);
        DLTensor x, like;
        int64_t dtype, as, elements = look_at(tensor, &x, &dtype);
        if (elements < 0) Py_RETURN_FALSE;
        if (shown == tensor) like = x, as = dtype;
        else if (look_at(shown, &like, &as) < 0) Py_RETURN_FALSE;
        if (!asked.add(self, x, elements, dtype, nullptr, shown, like, as, site)) return nullptr;
    }
    return asked.answered(self);
}

// keep(tensors): their values until take_changes(). False where nothing was done.
PyObject *lane_keep(Lane *self, PyObject *tensors) {
    if (!PyList_Check(tensors)) return PyErr_Format(PyExc_TypeError, "keep(list of tensors)");
    std::vector<Kept> &kept = self->rows->kept;
    kept.clear();
    int quiet = usual(CAPTURING + 1);
    if (quiet <= 0) return quiet ? nullptr : Py_NewRef(Py_False);
    int64_t total = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(tensors); ++i) {
        DLTensor x;
        int64_t dtype, elements = look_at(PyList_GetItem(tensors, i), &x, &dtype);
        if (elements < 0 || dtype > F16) {
            kept.clear();
            Py_RETURN_FALSE;
        }
        kept.push_back({x.data + x.byte_offset, elements, elements * (x.bits / 8), static_cast<int>(dtype)});
        total += kept.back().bytes;
    }
    self->rows->before.resize(static_cast<size_t>(total));
    called([](const void *rows) {
        char *to = const_cast<char *>(static_cast<const Rows *>(rows)->before.data());
        for (const Kept &one : static_cast<const Rows *>(rows)->kept) {
            std::memcpy(to, one.data, static_cast<size_t>(one.bytes));
            to += one.bytes;
        }
        return 0;
    }, self->rows, total);
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
    const char *before = self->rows->before.data();
    for (Py_ssize_t i = 0; i < length; ++i) {
        PyObject *tensor = PyList_GetItem(arguments[0], i);
        const Kept &one = kept[static_cast<size_t>(i)];
        DLTensor x;
        int64_t dtype, elements = look_at(tensor, &x, &dtype);
        if (elements == one.elements && dtype == one.dtype && x.data + x.byte_offset == one.data &&
            !asked.add(self, x, elements, dtype, before, tensor, x, dtype, PyList_GetItem(arguments[1], i)))
            return nullptr;
        before += one.bytes;
    }
    return asked.answered(self);
}

// norm(tensors): L2 norm over floating-point tensors, None where one is not plain, or not finite.
PyObject *lane_norm(Lane *self, PyObject *tensors) {
    if (!PyList_Check(tensors)) return PyErr_Format(PyExc_TypeError, "norm(list of tensors)");
    int quiet = usual(CAPTURING + 1);
    if (quiet < 0) return nullptr;
    if (!quiet) Py_RETURN_NONE;
    size_t length = static_cast<size_t>(PyList_Size(tensors)), width = static_cast<size_t>(width_of(0));
    std::vector<int64_t> rows(length * width);
    std::vector<Request> requests;
    int64_t bytes = 0;
    for (size_t i = 0; i < length; ++i) {
        DLTensor x;
        int64_t dtype, elements = look_at(PyList_GetItem(tensors, static_cast<Py_ssize_t>(i)), &x, &dtype);
        if (elements < 0 || dtype > F16) Py_RETURN_NONE;
        int64_t size = elements * (x.bits / 8), threads = size >= PARALLEL ? int64_t{self->threads} << 32 : 0;
        bytes += size;
        requests.push_back({x.data + x.byte_offset, elements, dtype | threads, rows.data() + i * width, nullptr});
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
    DLTensor x;
    if (exchange->borrow(rows, &x)) return nullptr;
    int64_t count = dense_count(x) / self->width, *from = rows_in(rows, count, self->width);
    if (!from) return PyErr_Format(PyExc_ValueError, "put(rows): rows of %lld int64 numbers each", static_cast<long long>(self->width));
    std::vector<int64_t> &packed = self->rows->packed;
    int64_t number = static_cast<int64_t>(packed.size()) / self->width;
    packed.insert(packed.end(), from, from + count * self->width);
    for (int64_t i = 0; i < count; ++i) note_finite(self, from + i * self->width);
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
    self->step = PyLong_AsLongLong(step), self->coming = 0;
    if (PyErr_Occurred()) return nullptr;
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
    DLTensor x;
    int64_t dtype, elements = look_at(tensor, &x, &dtype);
    if (elements <= 0) Py_RETURN_FALSE;
    auto known = self->rows->measured.find(x.data + x.byte_offset);
    if (known == self->rows->measured.end() || !known->second.returned) Py_RETURN_FALSE;
    return PyBool_FromLong(tells_of(known->second, tensor, version_of(tensor), elements, static_cast<int>(dtype)));
}

// drain(): heads, and the bytes of int64 columns: steps, times in ns, numbers in the step, numbers of packed rows, packed
// rows. All of it is forgotten.
PyObject *lane_drain(Lane *self, PyObject *) {
    Rows &rows = *self->rows;
    PyObject *heads = PyList_AsTuple(self->heads);
    if (!heads || PyList_SetSlice(self->heads, 0, PyList_Size(self->heads), nullptr)) return nullptr;
    Held result(PyTuple_New(6));
    if (!result) return nullptr;
    PyTuple_SetItem(result.get(), 0, heads);
    Py_ssize_t place = 1;
    for (std::vector<int64_t> *column : {&rows.steps, &rows.times, &rows.sequence, &rows.numbers, &rows.packed}) {
        auto *bytes = reinterpret_cast<const char *>(column->data());
        PyObject *made = PyByteArray_FromStringAndSize(bytes, static_cast<Py_ssize_t>(column->size() * sizeof(int64_t)));
        if (!made) return nullptr;
        PyTuple_SetItem(result.get(), place++, made);
        column->clear();
    }
    self->finite = 1;
    forget_measured(self);
    return result.release();
}

Py_ssize_t lane_length(Lane *self) { return static_cast<Py_ssize_t>(self->rows->numbers.size()); }

// ---- the module

template <class F> PyCFunction method(F *function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

template <class F> void *slot(F *function) { return reinterpret_cast<void *>(function); }

PyMemberDef SITE_MEMBERS[] = {
    {"place", T_OBJECT_EX, offsetof(Site, place), READONLY, nullptr},
    {"returned", T_BOOL, offsetof(Site, returned), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot SITE_SLOTS[] = {
    {Py_tp_new, slot(site_new)}, {Py_tp_dealloc, slot(site_dealloc)}, {Py_tp_traverse, slot(site_traverse)},
    {Py_tp_clear, slot(site_clear)}, {Py_tp_members, SITE_MEMBERS}, {0, nullptr},
};
PyType_Spec SITE_SPEC = {"tracehooks.capture._lane.Site", sizeof(Site), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, SITE_SLOTS};

PyMethodDef SEAT_METHODS[] = {{"take", method(seat_take), METH_FASTCALL, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyType_Slot SEAT_SLOTS[] = {
    {Py_tp_new, slot(seat_new)}, {Py_tp_dealloc, slot(seat_dealloc)}, {Py_tp_traverse, slot(seat_traverse)},
    {Py_tp_clear, slot(seat_clear)}, {Py_tp_methods, SEAT_METHODS}, {0, nullptr},
};
PyType_Spec SEAT_SPEC = {"tracehooks.capture._lane.Seat", sizeof(Seat), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                         SEAT_SLOTS};

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
    {"serve", method(lane_serve), METH_FASTCALL, nullptr},
    {"arrived", method(lane_arrived), METH_FASTCALL, nullptr},
    {"take", method(lane_take), METH_FASTCALL, nullptr},
    {"take_many", method(lane_take_many), METH_FASTCALL, nullptr},
    {"keep", method(lane_keep), METH_O, nullptr},
    {"take_changes", method(lane_take_changes), METH_FASTCALL, nullptr},
    {"norm", method(lane_norm), METH_O, nullptr},
    {"put", method(lane_put), METH_O, nullptr},
    {"add", method(lane_add), METH_FASTCALL, nullptr},
    {"next", method(lane_next), METH_NOARGS, nullptr},
    {"begin", method(lane_begin), METH_O, nullptr},
    {"forget", method(lane_forget), METH_NOARGS, nullptr},
    {"returned", method(lane_returned), METH_O, nullptr},
    {"drain", method(lane_drain), METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot LANE_SLOTS[] = {
    {Py_tp_new, slot(lane_new)}, {Py_tp_dealloc, slot(lane_dealloc)}, {Py_tp_traverse, slot(lane_traverse)},
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
    names[SITE] = PyUnicode_InternFromString("site"), names[HEAD] = PyUnicode_InternFromString("head");
    names[OUTPUT] = PyUnicode_InternFromString("output");
    grad_enabled = Py_NewRef(arguments[6]), ordered_dict = Py_NewRef(arguments[7]);
    int understood = connect_tensors(arguments);
    return understood < 0 ? nullptr : PyBool_FromLong(understood);
}

PyMethodDef FUNCTIONS[] = {{"connect", method(connect), METH_FASTCALL, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_lane", nullptr, -1, FUNCTIONS, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__lane() {
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, [] { ++generation; });
#endif
    PyObject *module = PyModule_Create(&MODULE);
    if (!module) return nullptr;
    struct {
        PyType_Spec *spec;
        PyTypeObject **type;
        const char *name;
    } types[] = {{&SITE_SPEC, &site_type, "Site"}, {&LANE_SPEC, &lane_type, "Lane"}, {&SEAT_SPEC, &seat_type, "Seat"}};
    for (auto &one : types) {
        PyObject *made = PyType_FromSpec(one.spec);
        *one.type = reinterpret_cast<PyTypeObject *>(made);
        if (!made || PyModule_AddObjectRef(module, one.name, made)) return nullptr;
    }
    return module;
}
#endif
