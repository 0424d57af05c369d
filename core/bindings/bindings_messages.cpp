// The Python binding of small messages: satrap.rpc sends the header, the sizes of the frames, the JSON frame and the
// arrays as one frame. src/satrap/rpc/header.py and values.py define the format, and their errors name what is wrong
// with a value or a message. This codec knows the usual types only; whatever is unusual or wrong it leaves to them, and
// returns None. Needs the GIL, since it reads and creates Python objects.
#include <nanobind/stl/vector.h>

#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <optional>
#include <string_view>

#include "bindings/bindings.hpp"

namespace satrap {

namespace {

constexpr std::size_t kHeaderBytes = 64, kMostBytes = 1 << 15, kMostArrays = 16;
constexpr std::uint8_t kVersion = 2, kRequest = 1, kLastKind = 5;

struct Header {
    char magic[4];
    std::uint8_t version, kind;
    std::uint16_t num_frames;
    std::uint64_t method, client, call, body_bytes;
    std::uint32_t deadline_ms, origin[4], zero; // origin: attempt, trainer, step, map version
};
static_assert(sizeof(Header) == kHeaderBytes);

enum Scalar : unsigned { kNone = 1, kBool = 2, kInt = 4, kFloat = 8, kStr = 16 };

// The type of a value: an array if it has a dtype; otherwise scalars of some types, or a list of them.
struct Type {
    nb::object dtype; // null: no array
    char format = 0;  // how the buffer protocol spells the type of the array's elements
    std::size_t item_bytes = 0;
    bool optional = false;
    unsigned scalars = 0; // which kinds the value may have, as bits of Scalar
    int items = -1;       // which kinds the items of a list may have; -1: no list
};

// Returns one of the two names that the buffer protocol has for a 64-bit integer.
char one_name(char format) { return format == 'l' ? 'q' : format == 'L' ? 'Q' : format; }

// An array's memory, borrowed while a message is packed.
class Borrowed {
  public:
    Borrowed() = default;
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    ~Borrowed() {
        for (std::size_t i = 0; i < count_; ++i) PyBuffer_Release(&views_[i]);
    }

    bool add(PyObject* array, const Type& type) {
        if (count_ == kMostArrays) return false;
        Py_buffer& view = views_[count_];
        if (PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
            PyErr_Clear();
            return false;
        }
        ++count_;
        num_bytes_ += static_cast<std::size_t>(view.len);
        return view.ndim == 1 && one_name(view.format[0]) == type.format && view.format[1] == '\0' &&
               static_cast<std::size_t>(view.itemsize) == type.item_bytes;
    }
    std::size_t count() const { return count_; }
    std::size_t num_bytes() const { return num_bytes_; }
    const Py_buffer& operator[](std::size_t i) const { return views_[i]; }

  private:
    std::array<Py_buffer, kMostArrays> views_;
    std::size_t count_ = 0, num_bytes_ = 0;
};

// Returns which Scalar an object is, in the range that a message may hold; 0 if none. A subclass is none.
unsigned scalar_of(PyObject* value) {
    if (value == Py_None) return kNone;
    if (PyBool_Check(value)) return kBool;
    if (PyFloat_CheckExact(value)) return std::isfinite(PyFloat_AS_DOUBLE(value)) ? unsigned{kFloat} : 0;
    if (PyUnicode_CheckExact(value)) return kStr;
    if (!PyLong_CheckExact(value)) return 0;
    int overflow = 0;
    PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow > 0 && PyLong_AsUnsignedLongLong(value) == static_cast<unsigned long long>(-1) && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return overflow < 0 ? 0 : unsigned{kInt};
}

bool fits(PyObject* value, unsigned allowed) {
    const unsigned kind = scalar_of(value);
    return (kind & allowed) != 0 || (kind == kInt && (allowed & kFloat) != 0);
}

template <typename Number> void write_number(std::string& out, Number value) {
    char digits[24];
    out.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
}

// Appends a scalar as Python's json does; false if it is not one that this codec writes.
bool write_scalar(std::string& out, PyObject* value, unsigned allowed) {
    if (!fits(value, allowed)) return false;
    if (value == Py_None) {
        out += "null";
    } else if (PyBool_Check(value)) {
        out += value == Py_True ? "true" : "false";
    } else if (PyFloat_CheckExact(value)) {
        char* digits = PyOS_double_to_string(PyFloat_AS_DOUBLE(value), 'r', 0, Py_DTSF_ADD_DOT_0, nullptr);
        if (digits == nullptr) throw nb::python_error();
        out += digits;
        PyMem_Free(digits);
    } else if (PyLong_CheckExact(value)) {
        int overflow = 0;
        const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow == 0)
            write_number(out, number);
        else
            write_number(out, PyLong_AsUnsignedLongLong(value));
    } else {
        Py_ssize_t size = 0;
        const char* text = PyUnicode_AsUTF8AndSize(value, &size);
        if (text == nullptr) { // a lone surrogate
            PyErr_Clear();
            return false;
        }
        if (size > static_cast<Py_ssize_t>(kMostBytes)) return false;
        const std::string_view view(text, static_cast<std::size_t>(size));
        for (const char c : view)
            if (c < ' ' || c > '~' || c == '"' || c == '\\') return false;
        out.append(1, '"').append(view).append(1, '"');
    }
    return out.size() <= kMostBytes;
}

bool write_plain(std::string& out, PyObject* value, const Type& type) {
    if (type.items < 0 || !PyList_CheckExact(value)) return write_scalar(out, value, type.scalars);
    out += '[';
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
        if (i != 0) out += ',';
        if (!write_scalar(out, PyList_GET_ITEM(value, i), static_cast<unsigned>(type.items))) return false;
    }
    out += ']';
    return true;
}

bool fits_plain(PyObject* value, const Type& type) {
    if (type.items < 0 || !PyList_CheckExact(value)) return fits(value, type.scalars);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i)
        if (!fits(PyList_GET_ITEM(value, i), static_cast<unsigned>(type.items))) return false;
    return true;
}

// The header of a message of one frame, and where its frames are; nothing unless all is in order.
struct Parts {
    Header header;
    const char* data;

    std::size_t size(std::size_t frame) const {
        std::uint32_t num_bytes;
        std::memcpy(&num_bytes, data + kHeaderBytes + 4 * frame, 4);
        return num_bytes;
    }
    const char* body() const { return data + kHeaderBytes + 4 * header.num_frames; }
};

std::optional<Parts> parts_of(const nb::bytes& message) {
    Parts parts{{}, message.c_str()};
    if (message.size() < kHeaderBytes) return {};
    Header& h = parts.header;
    std::memcpy(&h, parts.data, kHeaderBytes);
    const bool in_order = std::memcmp(h.magic, "STRP", 4) == 0 && h.version == kVersion && h.kind >= kRequest &&
                          h.kind <= kLastKind && h.zero == 0 && (h.kind != kRequest || h.deadline_ms != 0);
    const std::size_t begin = kHeaderBytes + 4 * h.num_frames;
    if (!in_order || h.num_frames == 0 || begin > message.size() || h.body_bytes != message.size() - begin) return {};
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < h.num_frames; ++i) total += parts.size(i);
    if (total != h.body_bytes) return {};
    return parts;
}

nb::object read_header(const nb::bytes& message) {
    const std::optional<Parts> parts = parts_of(message);
    if (!parts) return nb::none();
    const Header& h = parts->header;
    return nb::make_tuple(h.kind, h.method, h.client, h.call, h.num_frames, h.body_bytes, h.deadline_ms, h.origin[0],
                          h.origin[1], h.origin[2], h.origin[3]);
}

nb::object checked(PyObject* created) {
    if (created == nullptr) throw nb::python_error();
    return nb::steal(created);
}

class MessageCodec {
  public:
    // array_class, frombuffer: numpy's. scan: reads a JSON value from a str at a place; returns it, and its end.
    MessageCodec(const nb::list& types, nb::object array_class, nb::object frombuffer, nb::object scan)
        : array_class_(std::move(array_class)), frombuffer_(std::move(frombuffer)), scan_(std::move(scan)) {
        for (nb::handle each : types) {
            const auto given = nb::cast<nb::tuple>(each);
            Type type;
            if (given.size() == 4) {
                type.dtype = given[0];
                type.format = one_name(nb::cast<std::string>(given[1]).at(0));
                type.item_bytes = nb::cast<std::size_t>(given[2]);
                type.optional = nb::cast<bool>(given[3]);
            } else {
                type.scalars = nb::cast<unsigned>(given[0]);
                type.items = nb::cast<int>(given[1]);
            }
            types_.push_back(std::move(type));
        }
    }

    nb::object pack(std::uint8_t kind, std::uint64_t method, std::uint64_t client, std::uint64_t call,
                    std::uint32_t deadline_ms, const nb::object& origin, const nb::tuple& values,
                    std::size_t first) const {
        if (values.size() != first + types_.size()) return nb::none();
        std::string json = "[";
        Borrowed arrays;
        for (std::size_t i = 0; i < types_.size(); ++i) {
            if (i != 0) json += ',';
            PyObject* value = values[first + i].ptr();
            if (!types_[i].dtype.is_valid()) {
                if (!write_plain(json, value, types_[i])) return nb::none();
            } else if (value == Py_None && types_[i].optional) {
                json += "null";
            } else {
                if (Py_TYPE(value) != reinterpret_cast<PyTypeObject*>(array_class_.ptr())) return nb::none();
                if (!arrays.add(value, types_[i])) return nb::none();
                write_number(json, arrays[arrays.count() - 1].shape[0]);
            }
        }
        json += ']';
        const std::size_t body_bytes = json.size() + arrays.num_bytes();
        if (body_bytes > kMostBytes) return nb::none();
        Header header{{'S', 'T', 'R', 'P'},
                      kVersion,
                      kind,
                      static_cast<std::uint16_t>(1 + arrays.count()),
                      method,
                      client,
                      call,
                      body_bytes,
                      deadline_ms,
                      {},
                      0};
        std::size_t field = 0;
        for (const char* name : {"attempt", "trainer", "step", "map_version"})
            header.origin[field++] = nb::cast<std::uint32_t>(origin.attr(name));
        return joined(header, json, arrays);
    }

    nb::object unpack(const nb::bytes& message) const {
        if (message.size() > 2 * kMostBytes) return nb::none(); // Python limits the JSON frame
        const std::optional<Parts> parts = parts_of(message);
        if (!parts) return nb::none();
        const char* at = parts->body();
        PyObject* parsed = parse(at, parts->size(0));
        if (parsed == nullptr) return nb::none();
        nb::object values = nb::steal(parsed);
        if (!PyList_CheckExact(parsed) || static_cast<std::size_t>(PyList_GET_SIZE(parsed)) != types_.size())
            return nb::none();
        at += parts->size(0);
        std::size_t frame = 1;
        for (std::size_t i = 0; i < types_.size(); ++i) {
            const Type& type = types_[i];
            PyObject* value = PyList_GET_ITEM(parsed, static_cast<Py_ssize_t>(i));
            if (!type.dtype.is_valid()) {
                if (!fits_plain(value, type)) return nb::none();
            } else if (value != Py_None || !type.optional) {
                if (frame == parts->header.num_frames || !is_array(value, at, parts->size(frame), type))
                    return nb::none();
                PyObject* array = array_of(at, parts->size(frame), type).release().ptr();
                PyList_SetItem(parsed, static_cast<Py_ssize_t>(i), array);
                at += parts->size(frame++);
            }
        }
        if (frame != parts->header.num_frames) return nb::none();
        return values;
    }

  private:
    static nb::object joined(const Header& header, const std::string& json, const Borrowed& arrays) {
        const std::size_t size = kHeaderBytes + 4 * header.num_frames + header.body_bytes;
        nb::object message = checked(PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
        char* at = PyByteArray_AS_STRING(message.ptr());
        const auto put = [&at](const void* data, std::size_t n) {
            if (n != 0) std::memcpy(at, data, n);
            at += n;
        };
        const auto put_size = [&put](std::size_t n) {
            const auto bytes = static_cast<std::uint32_t>(n);
            put(&bytes, 4);
        };
        put(&header, kHeaderBytes);
        put_size(json.size());
        for (std::size_t i = 0; i < arrays.count(); ++i) put_size(static_cast<std::size_t>(arrays[i].len));
        put(json.data(), json.size());
        for (std::size_t i = 0; i < arrays.count(); ++i) put(arrays[i].buf, static_cast<std::size_t>(arrays[i].len));
        return message;
    }

    // Returns the JSON value in the frame, or null if it is not valid or something follows it.
    PyObject* parse(const char* frame, std::size_t size) const {
        PyObject* text = PyUnicode_DecodeUTF8(frame, static_cast<Py_ssize_t>(size), nullptr);
        PyObject* pair = text == nullptr ? nullptr : PyObject_CallFunction(scan_.ptr(), "Oi", text, 0); // (value, end)
        PyObject* value = nullptr;
        if (pair != nullptr && PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 1)) == PyUnicode_GET_LENGTH(text))
            value = Py_NewRef(PyTuple_GET_ITEM(pair, 0));
        if (pair == nullptr) PyErr_Clear();
        Py_XDECREF(pair);
        Py_XDECREF(text);
        return value;
    }

    static bool is_array(PyObject* count, const char* frame, std::size_t num_bytes, const Type& type) {
        if (scalar_of(count) != kInt) return false;
        int overflow = 0;
        const long long n = PyLong_AsLongLongAndOverflow(count, &overflow);
        const bool right = overflow == 0 && n >= 0 && num_bytes % type.item_bytes == 0 &&
                           static_cast<unsigned long long>(n) == num_bytes / type.item_bytes;
        if (!right || type.format != '?') return right;
        for (std::size_t i = 0; i < num_bytes; ++i)
            if (static_cast<unsigned char>(frame[i]) > 1) return false;
        return true;
    }

    // A copy, which is aligned; read-only, since it is a view of a bytes object.
    nb::object array_of(const char* frame, std::size_t num_bytes, const Type& type) const {
        const nb::object memory = checked(PyBytes_FromStringAndSize(frame, static_cast<Py_ssize_t>(num_bytes)));
        return checked(PyObject_CallFunctionObjArgs(frombuffer_.ptr(), memory.ptr(), type.dtype.ptr(), nullptr));
    }

    std::vector<Type> types_;
    nb::object array_class_, frombuffer_, scan_;
};

} // namespace

void bind_messages(nb::module_& m) {
    m.def("read_header", &read_header, "message"_a,
          nb::sig("def read_header(message: bytes) -> tuple[int, ...] | None"),
          "Returns the fields of the header of a message of one frame, in their order; None unless header and sizes "
          "are in order.");
    nb::class_<MessageCodec>(m, "MessageCodec", "Packs and unpacks messages of one frame with values of given types.")
        .def(nb::init<const nb::list&, nb::object, nb::object, nb::object>(), "types"_a, "array_class"_a,
             "frombuffer"_a, "scan"_a,
             nb::sig("def __init__(self, types: list[tuple[typing.Any, ...]], array_class: type, frombuffer: "
                     "typing.Any, scan: typing.Any) -> None"))
        .def("pack", &MessageCodec::pack, "kind"_a, "method"_a, "client"_a, "call"_a, "deadline_ms"_a, "origin"_a,
             "values"_a, "first"_a,
             nb::sig("def pack(self, kind: int, method: int, client: int, call: int, deadline_ms: int, origin: "
                     "typing.Any, values: tuple[typing.Any, ...], first: int) -> bytearray | None"),
             "Returns the message of the values from `first` on; None if it is large, or a value is unusual or wrong.")
        .def("unpack", &MessageCodec::unpack, "message"_a,
             nb::sig("def unpack(self, message: bytes) -> list[typing.Any] | None"),
             "Returns the values of a message; None if anything is unusual or wrong.");
}

} // namespace satrap
