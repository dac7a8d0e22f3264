"""Updates of the weights: a module for each optimizer of `core.optimizers.OPTIMIZERS`, named like it.

Its function `make` is called on all ranks, once a launch:

    def make(groups: list[dict[str, Any]], train: Train) -> torch.optim.Optimizer

groups: parameters (`params`) with their `weight_decay`: matrices first, then norms and biases, which have
none. Parameters are fp32: plain tensors, or DTensors whose first dimension is sharded over the axis
`shard` of their mesh (FSDP2), on a rank perhaps without a row. What is not summed over a whole matrix is
computed on the local tensors (`DTensor.to_local`).

The optimizer keeps the following; tests/unit/trainer/test_optim.py, test_optimizers.py and
tests/distributed/test_sharded_updates.py hold each optimizer of the table to it.

- *State*: for every parameter, from the first `step` on, the tensors that the table names, in fp32: those
  of the weight's shape made as `torch.zeros_like(weight)`, which shards them as the weight is; scalars
  with no dimensions, equal on all ranks. A checkpoint has these tensors and nothing else: no attribute of
  the optimizer and no number of a group. They are loaded on any number of ranks, by parameter name.
- *Steps* are counted, where the formula needs it, in a scalar `step`: torch casts the state of any other
  name to the type of the weight. The number of a step of the run is not known here.
- *Learning rate*: `group["lr"]` is set before each `step`, by warm-up and schedule. With lr 0 and
  gradients of 0 no weight moves: so torch has the state made that a checkpoint is then loaded into.
- *Clipping and skipped steps*: `_step_supports_amp_scaling = True`, and two attributes, scalars on the
  device that are set before each `step`, and None until then: gradients are divided by `grad_scale`;
  where `found_inf` is not 0, weights and state stay as they are, by `torch.where` or a fused kernel of
  torch, since gradients are then NaN and the host must not wait to learn it. Before an optimizer of torch
  without the mark, `optim.update` does both, and the host waits for the device in every step.
- *Equal bits*: the same weights, state and gradients give the same bits, on each rank of a group that
  holds copies, too: no random numbers, no atomic sums. Only what `exchanged_bytes` names is sent.
- *Speed*: `torch._foreach_…` or a fused kernel, which CPUs have as well: a Python loop over hundreds of
  weights takes longer than the update.
"""
