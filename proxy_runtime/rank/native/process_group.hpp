// The c10d backend of a rank: every collective is one message on the ordered channel.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

namespace ergo::rank {

// Announces the communicator to the proxy and returns its backend. `id` is the same at all members and
// new for every group that a job ever makes; `members` are global ranks in group order.
c10::intrusive_ptr<c10d::Backend> make_process_group(const std::string& name, uint64_t id, int rank,
                                                     const std::vector<int64_t>& members);

// The same for processes that do not know one another's channels yet: `meet` is called before the first collective and
// returns the id and the members.
using Meet = std::function<std::pair<uint64_t, std::vector<int64_t>>()>;
c10::intrusive_ptr<c10d::Backend> make_meeting_process_group(const std::string& name, int rank, int size, Meet meet);

}  // namespace ergo::rank
