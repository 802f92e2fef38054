"""torchrl: its learner, one of two in DDP, trains SAC on a replay buffer: three losses, target networks."""

import digests
import torch
import torch.distributed as dist
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.tensor_specs import Bounded
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate
from torchrl.trainers._distributed import _DDPProcessGroup
from torchrl.trainers._execution import _Learner


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    policy = nn.Sequential(MLP(in_features=6, out_features=4, num_cells=[32, 32]), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
        spec=Bounded(-1.0, 1.0, (2,)), in_keys=["loc", "scale"], distribution_class=TanhNormal,
    )  # fmt: skip
    value = ValueOperator(MLP(in_features=8, out_features=1, num_cells=[32, 32]), in_keys=["observation", "action"])
    loss = SACLoss(actor, value, action_spec=Bounded(-1.0, 1.0, (2,)), num_qvalue_nets=2)
    loss.make_value_estimator(gamma=0.9)
    optimizer = torch.optim.Adam(loss.parameters(), 3e-3)

    torch.manual_seed(50 + dist.get_rank())
    buffer = ReplayBuffer(storage=LazyTensorStorage(256))
    following = {
        "observation": torch.randn(256, 6), "reward": torch.randn(256, 1),
        "done": torch.zeros(256, 1, dtype=torch.bool), "terminated": torch.zeros(256, 1, dtype=torch.bool),
    }  # fmt: skip
    step = {"observation": torch.randn(256, 6), "action": torch.rand(256, 2) * 2 - 1}
    buffer.extend(TensorDict({**step, "next": TensorDict(following, [256])}, [256]))
    group = _DDPProcessGroup(
        dist.get_rank(), dist.get_rank(), 2, torch.device("cpu"), dist.group.WORLD, store=None, generation=0,
        owns_process_group=False,
    )  # fmt: skip
    learner = _Learner(
        loss_module=loss, replay_buffer=buffer, local_batch_size=16, optimizer=optimizer, optimization_stepper=None,
        target_net_updater=SoftUpdate(loss, eps=0.9), process_group=group, clip_norm=1.0,
    ).initialize()  # fmt: skip
    for round_id in range(1, 5):
        learner.step(6, round_id)
    state = learner.state_dict()
    digests.say(loss, optimizer, {name: state[name] for name in ("loss_module", "optimizer")})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
