// The Python binding of the engine: converts arrays and attributes to the core's types, validates them, releases the
// GIL, and maps the core's exceptions to satrap.errors. Lower layers do not check their arguments again.
#include "bindings/bindings.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <optional>

#include "bindings/bindings_bags.hpp"
#include "bindings/bindings_fp16.hpp"

namespace satrap {

namespace {

using Flags = nb::ndarray<bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Table& of_table(Engine& engine, std::size_t t) { return engine.table(checked_table(engine, t)); }

std::unique_ptr<Ticket> lookup_ids(Engine& engine, const Ids& ids, const Offsets& offsets, std::uint64_t step,
                                   std::uint64_t oldest_open, bool train, const FloatsOut& out, bool ticket,
                                   bool first_epoch) {
    const std::vector<std::int64_t> at = checked_offsets(offsets, engine.num_tables(), ids.size());
    require_size("out", out.size(), engine.out_size(at));
    const LookupStep when = checked_step(step, oldest_open, train, ticket, first_epoch);
    return engine.lookup(ids.data(), at, when, out.data(), ticket);
}

std::unique_ptr<Ticket> prepare(Engine& engine, const Ids& ids, const Offsets& offsets) {
    return engine.prepare(ids.data(), checked_offsets(offsets, engine.num_tables(), ids.size()));
}

std::size_t num_floats(const Engine& engine, const Offsets& offsets, std::size_t num_ids) {
    return engine.out_size(checked_offsets(offsets, engine.num_tables(), num_ids));
}

std::uint32_t checked_trainer(std::uint32_t trainer) {
    if (trainer >= kMostTrainers)
        refuse("trainer=" + std::to_string(trainer) + ", expected at most " + std::to_string(kMostTrainers - 1));
    return trainer;
}

void update(Engine& engine, Ticket& ticket, const FloatsIn& gradients, std::uint64_t step,
            const std::vector<double>& lrs, const std::optional<std::uint32_t>& trainer) {
    require_step("step", step);
    if (trainer) checked_trainer(*trainer);
    require_size("lrs", lrs.size(), engine.num_tables());
    for (std::size_t t = 0; t < lrs.size(); ++t) require_lr(engine, t, lrs[t]);
    if (!ticket.used.load() && engine.owns(ticket) && ticket.bags == nullptr)
        require_size("gradients", gradients.size(), ticket.num_floats);
    engine.update(ticket, gradients.data(), static_cast<std::uint32_t>(step), lrs, trainer.value_or(kNoTrainer));
}

void read_rows(Engine& engine, std::size_t t, const Ids& ids, const FloatsOut& values, const FloatsOut& state,
               const Flags& present) {
    Table& table = of_table(engine, t);
    const std::size_t n = ids.size(), dim = table.config().dim, state_dim = table.config().state_dim();
    require_size("values", values.size(), n * dim);
    require_size("state", state.size(), n * state_dim);
    require_size("present", present.size(), n);
    table.require_ids({ids.data(), n});
    for (std::size_t i = 0; i < n; ++i)
        present.data()[i] = table.read(ids.data()[i], values.data() + i * dim, state.data() + i * state_dim);
}

nb::dict stats(Engine& engine, std::size_t t) {
    checked_table(engine, t);
    const TableStats stats = without_gil([&] { return engine.stats(t); });
    nb::dict out;
    out["rows"] = stats.rows;
    out["bytes"] = stats.bytes;
    for (const Counters::Field& field : Counters::kFields) out[field.name] = stats.counters.*field.number;
    out["sightings"] = stats.sightings;
    if (const auto pool = engine.table(t).config().frame_pool; pool && engine.directory().pool(*pool).is_tiered()) {
        out["on_device"] = stats.in_frames;
        out["moved_in"] = stats.moved_in;
        out["moved_out"] = stats.moved_out;
    }
    return out;
}

void require_buckets(Engine& engine, std::size_t t, std::uint32_t first, std::uint32_t last) {
    const std::uint32_t n = of_table(engine, t).config().num_buckets;
    if (first > last || last > n)
        refuse("buckets " + std::to_string(first) + ".." + std::to_string(last) + " of " + std::to_string(n));
}

nb::dict as_rows(Engine& engine, const TableConfig& config, const RowColumns& columns) {
    const auto& pool = engine.blocks();
    const std::size_t n = columns.rows;
    nb::dict out;
    out["id"] = as_array<std::uint64_t>(pool, columns.id, {n});
    out["step"] = as_array<std::uint32_t>(pool, columns.step, {n});
    if (config.frame_pool) {
        out["frame"] = as_array<std::int32_t>(pool, columns.values, {n});
        return out;
    }
    out["values"] = config.dtype == Dtype::float32
                        ? nb::cast(as_array<float, 2>(pool, columns.values, {n, config.dim}))
                        : nb::cast(as_array<std::uint16_t, 2>(pool, columns.values, {n, config.dim}));
    out["state"] = as_array<float, 2>(pool, columns.state, {n, config.state_dim()});
    return out;
}

nb::dict as_sightings(Engine& engine, const RowColumns& columns) {
    nb::dict out;
    out["id"] = as_array<std::uint64_t>(engine.blocks(), columns.id, {columns.rows});
    out["step"] = as_array<std::uint32_t>(engine.blocks(), columns.step, {columns.rows});
    out["count"] = as_array<std::uint32_t>(engine.blocks(), columns.values, {columns.rows});
    return out;
}

nb::dict export_rows(Engine& engine, std::size_t t, std::uint32_t first, std::uint32_t last, std::uint32_t since,
                     bool others) {
    require_buckets(engine, t, first, last);
    return as_rows(engine, engine.table(t).config(),
                   without_gil([&] { return engine.export_rows(t, first, last, since, others); }));
}

nb::list begin_cut(Engine& engine, const std::vector<std::size_t>& tables, std::size_t limit, double patience) {
    for (std::size_t t : tables) checked_table(engine, t);
    if (!(patience >= 0.0 && patience <= 1e6)) refuse("patience=" + std::to_string(patience) + ", expected seconds");
    const std::chrono::nanoseconds nanoseconds(static_cast<std::int64_t>(patience * 1e9));
    nb::list out;
    for (const TableCut& cut : without_gil([&] { return engine.begin_cut(tables, limit, nanoseconds); })) {
        nb::dict figures;
        figures["version"] = cut.version;
        figures["expire_before"] = cut.expire_before;
        figures["lr"] = cut.lr;
        figures["rows"] = cut.rows;
        out.append(figures);
    }
    return out;
}

nb::dict export_cut(Engine& engine, std::size_t t, std::uint32_t first, std::uint32_t last, std::uint32_t since) {
    require_buckets(engine, t, first, last);
    const CutRows cut = without_gil([&] { return engine.export_cut(t, first, last, since); });
    nb::dict out = as_rows(engine, engine.table(t).config(), cut.columns);
    out["removed"] = as_array(engine, cut.removed);
    out["alive"] = cut.alive;
    return out;
}

nb::dict export_cut_sightings(Engine& engine, std::size_t t, std::uint32_t first, std::uint32_t last) {
    require_buckets(engine, t, first, last);
    return as_sightings(engine, without_gil([&] { return engine.export_cut_sightings(t, first, last); }));
}

nb::dict cut_figures(Engine& engine) {
    const CutFigures figures = engine.cut_figures();
    nb::dict out;
    out["bytes"] = figures.bytes;
    out["peak"] = figures.peak;
    out["kept"] = figures.kept;
    out["waits"] = figures.waits;
    out["waited_seconds"] = static_cast<double>(figures.waited_ns) * 1e-9;
    return out;
}

nb::dict export_sightings(Engine& engine, std::size_t t, std::uint32_t first, std::uint32_t last, bool others) {
    require_buckets(engine, t, first, last);
    return as_sightings(engine, without_gil([&] { return engine.export_sightings(t, first, last, others); }));
}

Array<std::uint64_t> export_removed(Engine& engine, std::size_t t, std::uint32_t first, std::uint32_t last,
                                    std::uint32_t since) {
    require_buckets(engine, t, first, last);
    return as_array(engine, without_gil([&] { return engine.export_removed(t, first, last, since); }));
}

Array<std::uint64_t> rows_with(Engine& engine, std::size_t t, const Ids& ids) {
    checked_table(engine, t);
    return as_array(engine, without_gil([&] { return engine.rows_with(t, {ids.data(), ids.size()}); }));
}

using Values = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void import_rows(Engine& engine, std::size_t t, const Ids& ids, const Words& steps, const Values& values,
                 const FloatsIn& state) {
    const TableConfig& config = of_table(engine, t).config();
    const std::size_t n = ids.size(), width = config.element_bytes();
    require_size("step", steps.size(), n);
    require_size("values", values.size(), n * config.dim);
    require_size("state", state.size(), n * config.state_dim());
    if (values.itemsize() != width)
        refuse("values of " + std::to_string(values.itemsize()) + " bytes each, expected " + std::to_string(width));
    engine.import_rows(t, n, ids.data(), steps.data(), static_cast<const std::byte*>(values.data()), state.data());
}

nb::object error_class(const char* name) { return nb::module_::import_("satrap.errors").attr(name); }

void translate(const std::exception_ptr& p, void*) {
    auto raise = [](const char* name, const std::exception& e) { PyErr_SetString(error_class(name).ptr(), e.what()); };
    try {
        std::rethrow_exception(p);
    } catch (const InputError& e) {
        raise("InputError", e);
    } catch (const NonFiniteError& e) {
        raise("NonFiniteError", e);
    } catch (const CapacityError& e) {
        raise("CapacityError", e);
    } catch (const SharedMemoryError& e) {
        raise("SharedMemoryError", e);
    } catch (const ForkError& e) {
        raise("ForkError", e);
    } catch (const MovedError& e) {
        raise("MovedError", e);
    } catch (const TicketError& e) {
        raise("TicketError", e);
    } catch (const InvariantError& e) {
        PyErr_SetString(PyExc_AssertionError, e.what());
    }
}

std::shared_ptr<Engine> make_engine(std::vector<TableConfig> tables, std::uint64_t seed, unsigned num_threads,
                                    const std::string& simd, const std::string& shared_path,
                                    const nb::bytes& shared_config, bool complete) {
    require_tables(tables.size());
    Options options = Options{seed, checked_threads(num_threads), simd};
    std::unique_ptr<Arena> arena;
    if (shared_path.empty())
        arena = std::make_unique<AnonymousArena>(tables.size());
    else
        arena =
            SharedArena::create(shared_path, tables.size(), {shared_config.c_str(), shared_config.size()}, complete);
    try {
        return Engine::owned(std::make_unique<Engine>(std::move(tables), options, std::move(arena)));
    } catch (...) {
        if (!shared_path.empty()) ::unlink(shared_path.c_str()); // created just now, and empty
        throw;
    }
}

std::shared_ptr<Engine> attach_engine(const std::string& path, std::vector<TableConfig> tables, std::uint64_t seed,
                                      unsigned num_threads, const std::string& simd) {
    require_tables(tables.size());
    Options options = Options{seed, checked_threads(num_threads), simd};
    auto arena = SharedArena::attach(path, tables.size());
    nb::gil_scoped_release release;
    return Engine::owned(Engine::attach(std::move(tables), options, std::move(arena)));
}

void bind_saving(nb::class_<Engine>& engine) {
    engine.def(
              "version", [](Engine& e, std::size_t t) { return of_table(e, t).ledger().version.load(); }, "table"_a)
        .def(
            "begin_version", [](Engine& e, std::size_t t) { return of_table(e, t).begin_version(); }, "table"_a)
        .def("export_rows", &export_rows, "table"_a, "bucket_begin"_a, "bucket_end"_a, "since"_a, "others"_a = false,
             nb::sig("def export_rows(self, table: int, bucket_begin: int, bucket_end: int, since: int, others: bool = "
                     "False) -> dict[str, NDArray[typing.Any]]"))
        .def("export_removed", &export_removed, "table"_a, "bucket_begin"_a, "bucket_end"_a, "since"_a)
        .def("export_sightings", &export_sightings, "table"_a, "bucket_begin"_a, "bucket_end"_a, "others"_a = false,
             nb::sig("def export_sightings(self, table: int, bucket_begin: int, bucket_end: int, others: bool = False) "
                     "-> dict[str, NDArray[typing.Any]]"))
        .def("begin_cut", &begin_cut, "tables"_a, "limit"_a, "patience"_a,
             nb::sig("def begin_cut(self, tables: Sequence[int], limit: int, patience: float) -> list[dict[str, "
                     "typing.Any]]"),
             "Notes how the tables are now, for export_cut; see engine.hpp.")
        .def("export_cut", &export_cut, "table"_a, "bucket_begin"_a, "bucket_end"_a, "since"_a,
             nb::sig("def export_cut(self, table: int, bucket_begin: int, bucket_end: int, since: int) -> dict[str, "
                     "typing.Any]"))
        .def("export_cut_sightings", &export_cut_sightings, "table"_a, "bucket_begin"_a, "bucket_end"_a,
             nb::sig("def export_cut_sightings(self, table: int, bucket_begin: int, bucket_end: int) -> dict[str, "
                     "NDArray[typing.Any]]"))
        .def(
            "end_cut", [](Engine& e, std::size_t t) { e.end_cut(checked_table(e, t)); }, "table"_a, WithoutGil())
        .def("cut_figures", &cut_figures, nb::sig("def cut_figures(self) -> dict[str, typing.Any]"))
        .def(
            "removed_since", [](Engine& e, std::size_t t) { return e.removed_since(checked_table(e, t)); }, "table"_a)
        .def("rows_with", &rows_with, "table"_a, "ids"_a,
             "Returns how many rows each bucket of this engine would have with rows of these ids, each given once.")
        .def(
            "import_rows", &import_rows, "table"_a, "id"_a, "step"_a, "values"_a, "state"_a, WithoutGil(),
            nb::sig("def import_rows(self, table: int, id: NDArray[numpy.uint64], step: NDArray[numpy.uint32], values: "
                    "NDArray[typing.Any], state: NDArray[numpy.float32]) -> None"))
        .def(
            "import_removed",
            [](Engine& e, std::size_t t, const Ids& ids) {
                e.import_removed(checked_table(e, t), {ids.data(), ids.size()});
            },
            "table"_a, "ids"_a, WithoutGil())
        .def(
            "import_sightings",
            [](Engine& e, std::size_t t, const Ids& ids, const Words& steps, const Words& counts, bool clear) {
                require_size("step", steps.size(), ids.size());
                require_size("count", counts.size(), ids.size());
                e.import_sightings(checked_table(e, t), ids.size(), ids.data(), steps.data(), counts.data(), clear);
            },
            "table"_a, "id"_a, "step"_a, "count"_a, "clear"_a, WithoutGil())
        .def(
            "expire_before", [](Engine& e, std::size_t t) { return of_table(e, t).expire_before(); }, "table"_a)
        .def(
            "restore",
            [](Engine& e, std::size_t t, std::uint32_t version, std::uint32_t latest_step, std::uint32_t expire_before,
               double lr) { e.restore(checked_table(e, t), version, latest_step, expire_before, lr); },
            "table"_a, "version"_a, "latest_step"_a, "expire_before"_a, "lr"_a, WithoutGil());
}

void bind_ticket(nb::module_& m) {
    nb::class_<Ticket>(m, "Ticket", "A looked-up batch that waits for its gradients; pass it to update() once.")
        .def_ro("n", &Ticket::size)
        .def_ro("batch_size", &Ticket::batch_size, "The number of samples of a batch of bags; else 0.")
        .def_prop_ro("sequence_floats", &sequence_sizes, "The number of floats of each sequence of a batch of bags.")
        .def(
            "only_of", [](const Ticket& t, std::size_t table) { return t.size == 0 || t.table == table; }, "table"_a,
            "Whether all ids are that table's.")
        .def_prop_ro("used", [](const Ticket& t) { return t.used.load(); });
}

void bind_steps(nb::class_<Engine>& engine) {
    engine.def_prop_ro("latest_step", &Engine::latest_step)
        .def_prop_ro(
            "attempt", [](Engine& e) { return e.arena().attempt().load(); },
            "The attempt whose processes may call; 0 before the first.")
        .def(
            "finished",
            [](Engine& e, std::uint32_t r, std::uint32_t s) {
                return e.ownership().steps().finished(checked_trainer(r), s);
            },
            "trainer"_a, "step"_a, "Whether finish() was called for this trainer and step, in this attempt.")
        .def(
            "finish",
            [](Engine& e, std::uint32_t r, std::uint32_t s) { e.ownership().steps().finish(checked_trainer(r), s); },
            "trainer"_a, "step"_a, "Records that every bucket has applied this update, for as long as the rows live.")
        .def("begin_attempt", &Engine::begin_attempt, "attempt"_a,
             "Starts an attempt in which no update counts as applied. No update may run.");
}

void bind_engine(nb::module_& m) {
    nb::class_<Engine> engine(m, "Engine", "Many tables in one memory; satrap.Store is its interface to one table.");
    engine
        .def(nb::new_(&make_engine), "tables"_a, "seed"_a, "num_threads"_a, "simd"_a = "auto", "shared_path"_a = "",
             "shared_config"_a = nb::bytes("", 0), "complete"_a = true)
        .def_static("attach", &attach_engine, "path"_a, "tables"_a, "seed"_a, "num_threads"_a, "simd"_a = "auto")
        .def_static("shared_unfinished", &SharedArena::unfinished, "path"_a, WithoutGil())
        .def_static(
            "shared_config",
            [](const std::string& path) {
                std::string blob = SharedArena::config_of(path);
                return nb::bytes(blob.data(), blob.size());
            },
            "path"_a)
        .def(
            "set_complete", [](Engine& e, bool complete) { e.arena().set_complete(complete); }, "complete"_a,
            "False: the shared-memory file cannot be attached until this is True again.")
        .def_prop_ro("simd", &Engine::simd)
        .def_prop_ro("num_threads", &Engine::num_threads)
        .def(
            "empty", [](Engine& e, std::size_t rows, std::size_t dim) { return empty_block(e.blocks(), rows, dim); },
            "rows"_a, "dim"_a, "Returns an uninitialised float32 block, 64-byte aligned, recycled when it is freed.")
        .def("lookup", &lookup_ids, "ids"_a, "offsets"_a, "step"_a, "oldest_open"_a, "train"_a, "out"_a, "ticket"_a,
             "first_epoch"_a = true, WithoutGil())
        .def("num_floats", &num_floats, "offsets"_a, "num_ids"_a, "The number of floats in the rows of so many ids.")
        .def("prepare", &prepare, "ids"_a, "offsets"_a, WithoutGil())
        .def("update", &update, "ticket"_a, "gradients"_a, "step"_a, "lrs"_a, "trainer"_a = nb::none(), WithoutGil(),
             "With a trainer: skips buckets that have already applied its update of this step.")
        .def("read", &read_rows, "table"_a, "ids"_a, "values"_a, "state"_a, "present"_a, WithoutGil())
        .def(
            "lr", [](Engine& e, std::size_t t) { return of_table(e, t).lr(); }, "table"_a)
        .def(
            "set_lr", [](Engine& e, std::size_t t, double lr) { of_table(e, t).set_lr(lr); }, "table"_a, "lr"_a)
        .def(
            "state_dim", [](Engine& e, std::size_t t) { return of_table(e, t).config().state_dim(); }, "table"_a)
        .def(
            "num_buckets", [](Engine& e, std::size_t t) { return of_table(e, t).config().num_buckets; }, "table"_a)
        .def(
            "num_rows", [](Engine& e, std::size_t t) { return e.num_rows(checked_table(e, t)); }, "table"_a,
            WithoutGil())
        .def("stats", &stats, "table"_a, nb::sig("def stats(self, table: int) -> dict[str, int]"))
        .def("check", [](Engine& e, std::size_t t) { of_table(e, t).check(); }, "table"_a, WithoutGil());
    bind_steps(engine);
    bind_saving(engine);
    bind_fp16(engine);
    bind_bags(m, engine);
    bind_frames(engine);
    bind_migration(engine);
}

} // namespace

NB_MODULE(_core, m) {
    m.doc() = "Satrap's native table; satrap.Store is the interface that users call.";
    nb::set_leak_warnings(false); // threads that are alive when the process ends keep what they refer to
    nb::register_exception_translator(translate);
    m.def(
        "simd_paths",
        [] {
            std::vector<std::string> names;
            for (const Kernels* kernels : available_kernels()) names.emplace_back(kernels->name);
            return names;
        },
        "The SIMD paths of this machine, best first.");
    m.attr("WINDOW_STEPS") = StepWindow::kSteps; // how many steps of a trainer may be in flight
    m.def(
        "borrow_threads",
        [](const std::optional<std::string>& path) {
            static std::map<std::string, const OpenMp*> known; // under the GIL
            if (path && known.count(*path) == 0) known[*path] = new OpenMp(*path);
            OpenMp::borrowed() = path ? known[*path] : nullptr;
        },
        "openmp"_a.none(),
        "Runs calls of this thread on the threads of the OpenMP library at this path, which must be loaded; None: on "
        "the core's threads again.");
    bind_hash(m);
    bind_config(m);
    bind_ticket(m);
    bind_engine(m);
    bind_split(m);
    bind_samples(m);
    bind_messages(m);
    bind_interaction(m);
}

} // namespace satrap
