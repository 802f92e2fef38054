"""What this build of torch offers."""

from __future__ import annotations

import torch

# A torch that was built for CPUs only cannot refuse access to a storage, so that parameters are not covered.
HAS_COVERS = hasattr(torch._C, "_set_storage_data_ptr_access_error_msg")
