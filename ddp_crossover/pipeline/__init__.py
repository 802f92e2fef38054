"""The memory of fusion groups, the order of their legs, and which updates wait for a gather leg.

[Note: DeAR's terms]
bucket: DDP's ``GradBucket``, the unit in which gradients arrive in backward.
fusion group: the unit in which gradients travel. One reduce-scatter and one all-gather carry it.
fusion buffer: the memory of a fusion group: parts of DDP's buckets where a link takes these, else a range of an arena.
arena: flat memory for copies of all gradients of one dtype and device, in the wire dtype.
shard: this rank's slice of a fusion buffer, or of each of its parts. After the scatter leg it holds the sum over ranks.
scatter leg, gather leg: the reduce-scatter and the all-gather of a fusion group.
arrival order, use order: the order in which backward produces gradients, and in which forward first uses parameters.
slot: one parameter, the place of its gradient in the fusion buffers, and what is still to be done with it.
pending gradient: a ``PendingGrad`` in ``.grad``, whose value is still on the way.
pending parameter: a parameter whose update was asked for by ``step()`` and has not been applied.
touch: the first use of a pending parameter, which applies its update.
stand-in: an optimizer of the same class and settings, over some of the parameters; it computes deferred updates.
exposed communication: time in which the training thread waits for a leg.
"""
