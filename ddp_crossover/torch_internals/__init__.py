"""Every private API of torch that this package uses, each behind one small function.

Checked on torch 2.11 to 2.15. If a name is missing, the error says so here, instead of failing far away.
"""

from torch._C._distributed_c10d import GradBucket as GradBucket  # dist.GradBucket has no type stub

from ddp_crossover.torch_internals.autograd import call_after_backward as call_after_backward
from ddp_crossover.torch_internals.autograd import is_in_backward as is_in_backward
from ddp_crossover.torch_internals.autograd import keeps_overwritten_values as keeps_overwritten_values
from ddp_crossover.torch_internals.autograd import unrecorded as unrecorded
from ddp_crossover.torch_internals.compiled import call_around_compiled as call_around_compiled
from ddp_crossover.torch_internals.compiled import called_by_compiled_code as called_by_compiled_code
from ddp_crossover.torch_internals.compiled import is_compiled as is_compiled
from ddp_crossover.torch_internals.compiled import is_compiled_in_place as is_compiled_in_place
from ddp_crossover.torch_internals.compiled import on_compile_start as on_compile_start
from ddp_crossover.torch_internals.ddp import bucket_cap_bytes as bucket_cap_bytes
from ddp_crossover.torch_internals.ddp import comm_hooks_of as comm_hooks_of
from ddp_crossover.torch_internals.ddp import forget_comm_hooks as forget_comm_hooks
from ddp_crossover.torch_internals.ddp import has_comm_hook as has_comm_hook
from ddp_crossover.torch_internals.ddp import has_run_forward as has_run_forward
from ddp_crossover.torch_internals.ddp import is_joining as is_joining
from ddp_crossover.torch_internals.ddp import is_updated_in_backward as is_updated_in_backward
from ddp_crossover.torch_internals.ddp import managed_parameters as managed_parameters
from ddp_crossover.torch_internals.ddp import process_group_timeout as process_group_timeout
from ddp_crossover.torch_internals.ddp import rebuild_buckets as rebuild_buckets
from ddp_crossover.torch_internals.ddp import references_to_bucket_view as references_to_bucket_view
from ddp_crossover.torch_internals.dispatch import allow_foreach as allow_foreach
from ddp_crossover.torch_internals.dispatch import is_traced as is_traced
from ddp_crossover.torch_internals.dispatch import outside_of_modes as outside_of_modes
from ddp_crossover.torch_internals.dispatch import settle_before_use as settle_before_use
from ddp_crossover.torch_internals.dispatch import tensors_in as tensors_in
from ddp_crossover.torch_internals.memory import cover_of as cover_of
from ddp_crossover.torch_internals.memory import references_to_memory as references_to_memory
from ddp_crossover.torch_internals.memory import set_data as set_data
from ddp_crossover.torch_internals.memory import storage_use_count as storage_use_count
from ddp_crossover.torch_internals.memory import use_count as use_count
from ddp_crossover.torch_internals.optimizers import STEP_HOOKS as STEP_HOOKS
from ddp_crossover.torch_internals.optimizers import has_hooks as has_hooks
from ddp_crossover.torch_internals.optimizers import has_raw_step as has_raw_step
from ddp_crossover.torch_internals.optimizers import move_to_front as move_to_front
from ddp_crossover.torch_internals.optimizers import raw_step as raw_step
from ddp_crossover.torch_internals.optimizers import step_pre_hooks as step_pre_hooks
from ddp_crossover.torch_internals.private import CHECKED_ON as CHECKED_ON
