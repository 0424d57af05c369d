// Saves beside training: begin_cut marks all buckets in no time that depends on rows, and the exports of the cut return
// their rows as they were then. A bucket is exported in four steps: (1) under its lock, its rows of the cut are listed:
// those that are unchanged in their slots, and the copies that changes have kept (old_rows.hpp); (2) without the lock,
// they are sorted; (3) a slice at a time under the lock, those that are still unchanged are copied, each of which then
// needs no copy any more; (4) without the lock, the others are taken from the copies, which are then released. So a
// bucket is never locked for longer than a slice takes, however large it is.
#include <thread>

#include "base/errors.hpp"
#include "engine/engine.hpp"

namespace satrap {

namespace {

constexpr std::size_t kSlice = 2048;            // rows that are copied under one lock
constexpr std::chrono::microseconds kYield{20}; // for calls that wait for the lock, which is not a fair one

const Head& head_at(const std::byte* line) { return *reinterpret_cast<const Head*>(line); }

// A sighting of the cut.
struct Sighting {
    std::uint64_t id;
    Head head;
};

// Lists the slots of the bucket's rows at the cut that changed since a version, and what it had removed. Rows that need
// not be exported need not be kept, either.
void list_cut(Bucket& bucket, std::uint32_t expire_before, std::uint32_t since, HashOrder& order, CutRows& cut) {
    SATRAP_ASSERT(bucket.mutex.is_held());
    OldRows& old = bucket.rows.old_rows();
    const auto list = [&](std::uint32_t slot, std::uint64_t id, const Head& head) {
        if (head.stamp < expire_before) {
            if (since != 0) cut.removed.push_back(id);
            return false;
        }
        ++cut.alive;
        if (head.changed < since) return false;
        order.add(id, slot);
        return true;
    };
    for (const OldRows::OldRow& row : old.rows()) list(row.slot, row.id, head_at(row.line));
    bucket.rows.for_each([&](std::uint32_t slot, const Head& head) {
        if (!old.is_done(slot) && !list(slot, bucket.rows.id(slot), head)) old.set_done(slot);
    });
    for (std::size_t i = 0; since != 0 && i < std::min(bucket.cut_removed, bucket.removed.size()); ++i)
        if (bucket.removed[i].version >= since) cut.removed.push_back(bucket.removed[i].id);
}

} // namespace

std::vector<TableCut> Engine::begin_cut(std::span<const std::size_t> tables, std::size_t limit,
                                        std::chrono::nanoseconds patience) {
    for (std::size_t t : tables)
        if (table(t).cut_version() != 0)
            throw InputError("table '" + table(t).config().name + "': a save of it has not ended");
    cut_memory_.begin(limit, patience);
    std::vector<TableCut> cuts;
    for (std::size_t t : tables) { // before any bucket: what changes after its mark is changed at this version
        Table& table = tables_[t];
        const std::uint32_t version = table.begin_version();
        table.cut_expire_before() = table.expire_before();
        table.cut_version().store(version);
        cuts.push_back({version, table.cut_expire_before(), table.lr(), 0});
    }
    for (std::size_t i = 0; i < tables.size(); ++i) {
        each_bucket(tables[i], 0, tables_[tables[i]].config().num_buckets, false, [&](Bucket& bucket) {
            if (bucket.places == nullptr) bucket.begin_cut(cut_memory_);
            cuts[i].rows += bucket.rows.size();
        });
    }
    return cuts;
}

void Engine::require_cut(const Table& table) const {
    if (table.cut_version() == 0)
        throw InputError("table '" + table.config().name +
                         "': its save has ended or was given up: it had written nothing for a long time, while calls "
                         "waited for it to release memory");
}

CutRows Engine::export_cut(std::size_t t, std::uint32_t first, std::uint32_t last, std::uint32_t since) {
    Table& table = this->table(t);
    RowExport out(*blocks_, table.config());
    CutRows cut;
    const auto places_lock = directory_.lock();
    require_cut(table);
    for (std::uint32_t b = first; b < last; ++b) {
        if (!ownership_.owns(t, b)) continue;
        export_bucket_cut(table, table.bucket(b), since, out, cut);
        cut_memory_.give(0); // there is progress
    }
    cut.columns = out.done();
    return cut;
}

// Adds one bucket's rows to `out`, its removed ids to `cut`; see the file's head for the four steps.
void Engine::export_bucket_cut(Table& table, Bucket& bucket, std::uint32_t since, RowExport& out, CutRows& cut) {
    const auto lock_bucket = [&] {
        std::unique_lock lock(bucket.mutex);
        if (bucket.places == nullptr && !bucket.rows.in_cut()) require_cut(table);
        return lock;
    };
    HashOrder order(table.config().is_direct());
    const std::size_t first_removed = cut.removed.size();
    {
        const auto lock = lock_bucket();
        if (bucket.places != nullptr) bucket.begin_cut(cut_memory_);
        list_cut(bucket, table.cut_expire_before(), since, order, cut);
    }
    sort_hashed(cut.removed, first_removed, table.config().is_direct());
    const std::span<const HashOrder::Entry> sorted = order.sorted(table.config().bucket_bits());
    out.reserve(out.rows() + sorted.size());
    const std::size_t first_line = out.add(sorted.size());
    std::vector<std::pair<std::uint32_t, std::size_t>> changed; // slots, and the lines of their old rows
    for (std::size_t begin = 0; begin < sorted.size(); begin += kSlice) {
        if (begin != 0 && cut_memory_.has_kept()) std::this_thread::sleep_for(kYield);
        const auto lock = lock_bucket();
        OldRows& old = bucket.rows.old_rows();
        for (std::size_t i = begin; i < std::min(begin + kSlice, sorted.size()); ++i) {
            const std::uint32_t slot = sorted[i].slot;
            if (old.is_done(slot)) {
                changed.emplace_back(slot, first_line + i);
                continue;
            }
            out.put(first_line + i, bucket.rows.id(slot), bucket.rows.head(slot), bucket.rows.row(slot));
            old.set_done(slot);
        }
    }
    std::unique_ptr<OldRows> old;
    {
        const auto lock = lock_bucket();
        old = bucket.rows.take_cut();
    }
    if (changed.empty()) return;
    std::vector<OldRows::OldRow> rows = old->rows();
    const auto by_slot = [](const auto& a, const auto& b) { return a.slot < b.slot; };
    std::sort(rows.begin(), rows.end(), by_slot);
    for (const auto& [slot, line] : changed) {
        const auto row = std::lower_bound(rows.begin(), rows.end(), OldRows::OldRow{slot, 0, nullptr}, by_slot);
        if (row == rows.end() || row->slot != slot) throw InvariantError("a row of the cut was changed and not kept");
        out.put(line, row->id, head_at(row->line), row->line + sizeof(Head));
    }
}

// Exports id, step, and the count in `values`.
RowColumns Engine::export_cut_sightings(std::size_t t, std::uint32_t first, std::uint32_t last) {
    Table& table = this->table(t);
    RowExport out(*blocks_, sizeof(Head::changed), 0, 0);
    require_cut(table);
    std::vector<Sighting> seen;
    for (std::uint32_t b = first; b < last; ++b) {
        seen.clear();
        each_bucket(t, b, b + 1, false, [&](Bucket& bucket) {
            Rows& sightings = bucket.sightings;
            if (bucket.places != nullptr) sightings.begin_cut(cut_memory_);
            if (!sightings.in_cut()) require_cut(table);
            const std::unique_ptr<OldRows> old = sightings.take_cut();
            sightings.for_each([&](std::uint32_t slot, const Head& head) {
                if (old == nullptr || !old->is_done(slot)) seen.push_back({sightings.id(slot), head});
            });
            for (std::size_t i = 0; old != nullptr && i < old->rows().size(); ++i)
                seen.push_back({old->rows()[i].id, head_at(old->rows()[i].line)});
        });
        HashOrder order(table.config().is_direct());
        for (std::uint32_t i = 0; i < seen.size(); ++i) order.add(seen[i].id, i);
        out.reserve(out.rows() + order.size());
        std::size_t line = out.add(order.size());
        for (const HashOrder::Entry& entry : order.sorted(table.config().bucket_bits())) {
            const auto& [id, head] = seen[entry.slot];
            out.put(line++, id, head, reinterpret_cast<const std::byte*>(&head.changed));
        }
    }
    return out.done();
}

void Engine::end_cut(std::size_t t) {
    table(t).cut_version().store(0);
    each_bucket(t, [](Bucket& bucket) { bucket.end_cut(); });
}

void Engine::wait_for_cut_room() {
    if (cut_memory_.wait_for_room()) return;
    for (std::size_t t = 0; t < tables_.size(); ++t)
        if (tables_[t].cut_version() != 0) end_cut(t);
}

} // namespace satrap
