// The handles of collectives that torch.distributed gives to scripts.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "collective_message.hpp"

namespace ergo::rank {

// Of device tensors: the channel is ordered, so whatever uses the results comes after the collective. The work is done,
// in the sense in which a CUDA stream is "done" with what was enqueued.
//
// Of host tensors (`results` is not empty): done when the results have been copied back, which `wait` and `get_future`
// do, and `is_completed` once that needs no waiting. So nothing blocks before the script asks for a result.
c10::intrusive_ptr<c10d::Work> make_work(int rank, std::vector<at::Tensor> outputs, c10d::OpType type,
                                         HostResults results = {});

// Copies back what has arrived for works that nobody kept: a script may know by other means that they are done.
void settle_forgotten_works();

}  // namespace ergo::rank
