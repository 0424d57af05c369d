// Arrays over what the core returns for rows on a device.
#pragma once

#include "bindings/bindings_bags.hpp"

namespace satrap {

// Moves a vector into a numpy array of elements of the same size.
template <typename T, typename Element> nb::object moved(std::vector<Element> elements) {
    constexpr std::size_t width = sizeof(Element) / sizeof(T);
    static_assert(sizeof(Element) == width * sizeof(T));
    T* data = reinterpret_cast<T*>(elements.data());
    const std::size_t n = elements.size();
    if constexpr (width == 1)
        return nb::cast(array_over<T>(data, {n}, std::move(elements)));
    else
        return nb::cast(array_over<T, 2>(data, {n, width}, std::move(elements)));
}

// Returns one member of all elements as a numpy array of T, which has the member's size.
template <typename T, typename Element, typename Member>
nb::object column(const std::vector<Element>& elements, Member Element::* member) {
    std::vector<Member> values;
    for (const Element& element : elements) values.push_back(element.*member);
    return moved<T>(std::move(values));
}

template <typename T, typename Element> nb::object moved_or_none(std::vector<Element> elements) {
    return elements.empty() ? nb::object(nb::none()) : moved<T>(std::move(elements));
}

// Whether a ticket's block, and each of its sequences, has a gradient.
using GivenFlags = std::pair<bool, std::vector<bool>>;

// bags_of: returns the bags of a ticket, or nullptr if the call refuses it.
template <typename AnyTicket, typename BagsOf>
std::vector<GivenParts> checked_parts(const std::vector<AnyTicket*>& tickets, const std::vector<GivenFlags>& given,
                                      BagsOf bags_of) {
    if (tickets.empty()) refuse("no ticket was given; expected at least one");
    require_size("given", given.size(), tickets.size());
    std::vector<GivenParts> parts;
    for (std::size_t k = 0; k < tickets.size(); ++k) {
        if (tickets[k] == nullptr) refuse("a ticket is None");
        if (const Bags* bags = bags_of(*tickets[k]); bags != nullptr)
            require_size("given sequences", given[k].second.size(), bags->sequences.size());
        parts.push_back({given[k].first, given[k].second});
    }
    return parts;
}

inline nb::dict dict_of(FrameRuns runs) {
    nb::dict out;
    out["tables"] = moved<std::int32_t>(std::move(runs.first_run_of_table));
    out["frames"] = moved<std::int32_t>(std::move(runs.frames));
    out["begin"] = moved<std::int32_t>(std::move(runs.begin));
    out["end"] = moved<std::int32_t>(std::move(runs.end));
    out["places"] = moved<std::int32_t>(std::move(runs.places));
    out["factors"] = moved_or_none<float>(std::move(runs.factors));
    out["keys"] = moved_or_none<std::int64_t>(std::move(runs.keys));
    out["ids"] = moved_or_none<std::uint64_t>(std::move(runs.ids));
    return out;
}

} // namespace satrap
