"""The kinds of events that the probe of a check records, each with the name of its lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

from stepladder.tools.probe.events import CodeLine, ProbeEvent


class ProcessStart(ProbeEvent, kind="start"):
    """A process has started, or knows its rank; -1 where that is not known."""

    rank: int = -1
    world: int = -1


class GroupJoined(ProcessStart, kind="who"):
    """A process has become a rank of the process group."""


class ProcessExit(ProbeEvent, kind="exit"):
    """A process ends by itself, with or without a process group."""

    group: bool = False


class LoadedLibraries(ProbeEvent, kind="libraries"):
    """The modules that the next starts may have imported before the probe is attached."""

    names: list[str]
    others: dict[str, str] = field(default_factory=dict)  # the files of modules of no library


class SpawnsRanks(ProbeEvent, kind="spawns"):
    """The script makes its ranks itself, and must be started as one process."""


class RankRead(ProbeEvent, kind="readrank"):
    """The user's code has read a variable that says which rank this is, or how to meet others."""

    name: str


class LibraryRankRead(RankRead, kind="libraryreadrank"):
    """A library has read such a variable, other than in its import."""


class OtherGroup(ProbeEvent, kind="othergroup"):
    """The ranks may meet otherwise than in a process group: by a store, RPC or another library."""

    averages: bool = False  # whether the library exchanges gradients itself


class RankOption(ProbeEvent, kind="rankoption"):
    """The script got its rank, or its local rank, as an option of its command line."""

    option: str
    variable: str  # which has the same number


class FabricStart(ProbeEvent, kind="fabric"):
    """The variables of `fabric run` were set."""


class NeedsOneNode(ProbeEvent, kind="onenode"):
    """The script takes its local rank for its rank, and must be started on one node."""


class EnoughPasses(ProbeEvent, kind="enough"):
    """The check has seen enough, and ends this rank."""


class Halt(ProbeEvent, kind="halt"):
    """A rank waits to be ended, after its first snapshot."""


class Paused(ProbeEvent, kind="paused"):
    """Rank 0 waits for the signal of an interruption."""


class SnapshotFound(ProbeEvent, kind="snapshot"):
    """Between two steps, weights that are trained were written to files."""

    paths: Sequence[str]


class GpuQuery(ProbeEvent, kind="asked"):
    """The script has asked whether there is a GPU."""

    answer: bool = False


class Refusal(ProbeEvent, kind="refused"):
    """A change outside of the copy was refused."""

    path: str


class Returned(ProbeEvent, kind="did"):
    """A collective or a backward pass, in which a rank may wait for others, has returned."""


class GroupInit(ProbeEvent, kind="init"):
    """init_process_group was called, by the user's code or by a library."""

    backend: str
    direct: bool = True


class GroupDestroy(ProbeEvent, kind="destroy"):
    """destroy_process_group was called."""


class JoinContext(ProbeEvent, kind="join"):
    """The script has entered a Join context."""


class ScriptCollective(ProbeEvent, kind="coll"):
    """A collective was called."""

    op: str  # the function
    way: str = ""  # the functions and lines that lead to the call
    group: str = ""  # the ranks of a group other than the default one
    shape: list[int] | None = None  # the shape of the tensor; None where there is none
    ptr: int | None = None  # the address of its values
    count: int = 0  # the number of its values
    value: Sequence[float] = ()  # its values, where they are few
    sums: bool = True  # whether it adds up, and does not average, for example
    numbers: Sequence[int] = ()  # the sample numbers among gathered objects


class SetEpoch(ProbeEvent, kind="setepoch"):
    """A sampler, by its id, was told the epoch."""

    sampler: int
    value: Any


class PassStart(ProbeEvent, kind="pass"):
    """An iteration over a loader begins."""

    number: int  # its number in the process
    way: str = ""  # the functions and lines that lead to the loop
    built: CodeLine | None = None  # the line that made the loader
    built_before: int = 0  # how many loaders the line had made before
    built_from: Sequence[CodeLine] = ()  # the lines that led there, from the innermost outwards
    sampler_built: CodeLine | None = None  # the line that made the sampler
    loader: int = 0  # the id of the loader
    loader_class: str = ""  # the class of the loader
    sampler_id: int = 0
    epoch: int | None = None  # by which the sampler shuffles
    settable: bool = False  # whether the sampler has set_epoch
    data_settable: bool = False  # whether the data set has set_epoch
    shuffle: bool = False
    distributed: bool = False
    replicas: int | None = None  # the number of ranks among which a sampler divides samples
    sampler_rank: int | None = None  # the rank whose share the sampler takes
    iterable: bool = False  # whether the data set is a stream
    batch_size: int | None = None
    drop_last: bool = False
    sampler_drop: bool = False  # whether the sampler drops a remainder
    workers: int = 0
    fingerprint: str = ""  # a hash that is equal for equal data sets
    held: Sequence[float] = ()  # sums of the numbers that the data set holds for its first samples
    length: int | None = None  # the length of the data set
    base_length: int | None = None  # the length of the data set below all Subsets


class Batch(ProbeEvent, kind="batch"):
    """A loader has returned a batch."""

    number: int  # the number of the pass
    indices: list[int] | None  # the indices of its samples below all Subsets; None for a stream
    rows: list[str]  # the hashes of its rows
    size: int  # the number of its rows
    sums: Sequence[float] = ()  # of each row: the sum of some numbers of its first tensor


class PassEnd(ProbeEvent, kind="endpass"):
    """A pass has ended, by itself or cut by the check."""

    number: int
    cut: bool


class Fetch(ProbeEvent, kind="fetch"):
    """A rank, or a worker of its loader, has fetched samples."""

    indices: list[int]  # the first samples
    used: Digests  # the states of the random generators that were used
    worker: int = -1  # the number of the worker; -1 in the rank itself
    parent: int = -1  # the process that made the worker


class Draw(ProbeEvent, kind="draw"):
    """The user's code has called a function that draws random numbers."""

    fn: str
    state: str
    for_sample: bool = False  # whether it was called while a data set read a sample


class Seeding(ProbeEvent, kind="seeded"):
    """torch's own generator was seeded."""


class SharedFile(ProbeEvent, kind="shared"):
    """A file of a data set is open while workers are forked."""

    path: str
    type: str  # its class, with the module


class FileWrite(ProbeEvent, kind="wrote"):
    """The script has opened a file in its folder to write it anew, or has locked a file."""

    path: str
    locked: bool = False


class FileAppend(ProbeEvent, kind="append"):
    """The script opens a file of its folder to write after what it holds."""

    path: str


class FileRemoval(ProbeEvent, kind="removed"):
    """The script has removed a file or a folder in its folder."""

    path: str


class FolderMade(ProbeEvent, kind="folder"):
    """The script makes a folder in its folder, or tries to."""

    path: str


class PathSearch(ProbeEvent, kind="looked"):
    """The script has looked whether a path exists."""

    path: str


class FileMove(ProbeEvent, kind="moved"):
    """A file was renamed."""

    source: str
    target: str


class ShownText(ProbeEvent, kind="shown-text"):
    """The user's code has shown something."""

    caller: CodeLine | None = None  # the line that called the function that shows it
    text: str = ""


class Print(ShownText, kind="print"):
    """The user's code has printed or logged something."""


class WrittenText(ShownText, kind="written-text"):
    """The user's code has written a line of text, or several at once, to a file that it opened."""

    path: str


class Statistic(ProbeEvent, kind="statistic"):
    """The user's code has computed a loss, or another scalar that is a mean or a sum."""

    value: float
    is_mean: bool
    count: int = 0  # the number of values of which it is made
    grad: bool = False  # whether it depends on weights that are trained


class Forward(ProbeEvent, kind="forward"):
    """A complete model was called."""

    root: int  # the id of the model
    model_class: str = ""  # its class
    grad: bool = True  # whether the call keeps a graph
    size: int = 0  # the number of rows of its input
    wrapped: str = ""  # the class of the wrapper that averages its gradients; empty without one
    rows: Sequence[str] = ()  # the hashes of the rows of its input
    sums: Sequence[float] = ()  # of each row, as in Batch
    live: int = 0  # its layers of dropout and batch norm that act as in training
    moded: int = 0  # its layers that differ in training and evaluation
    moded_on: int = 0  # those that are in training mode
    norms: int = 0  # its layers of batch norm in training mode that see one rank's samples alone
    drops: int = 0  # its layers of dropout in training mode
    random: str = ""  # a hash of the random state, of which these layers draw
    weights: str = ""  # a hash of its weights, in an evaluation
    sync: bool = False  # whether the wrapper averages gradients after this call


class OptimizerBuilt(ProbeEvent, kind="optimizer"):
    """An optimizer was built."""

    cls: str = ""  # its class


OBJECT_OF = "object of "


class NamesInUse(ProbeEvent, kind="names"):
    """The script uses a model, a loader, an optimizer, a schedule, a scaler or a generator.

    Or an object of a class of the user's.
    """

    what: str  # such as "model"; OBJECT_OF and the name of a class
    object: int  # its id
    # From the innermost function outwards: file, line, function, and its name for the object.
    uses: Sequence[Sequence[Any]] = ()


class RowNames(ProbeEvent, kind="rownames"):
    """A function calls a model for a step, and has these names for the rows of a batch."""

    names: Sequence[str]
    count: int = 0  # the number of rows


class CarriedState(ProbeEvent, kind="carried"):
    """A module is called with what it has returned in the step before, as a stateful LSTM is."""


class CoupledSamples(ProbeEvent, kind="coupled"):
    """A loss is about to give gradients that depend on the outputs of other samples."""

    calls: Sequence[Sequence[Any]]  # the lines that have called the models: file and line


class NamesWhereBuilt(ProbeEvent, kind="namesbuilt"):
    """An optimizer is about to be built."""

    # From the innermost function outwards: file, line, function, and the models that it names: the
    # name of each, its id and those of its parts.
    places: Sequence[Sequence[Any]] = ()


class EvalMode(ProbeEvent, kind="eval"):
    """The user's code has called eval() of a model."""


class WrapperBuilt(ProbeEvent, kind="ddp"):
    """A DistributedDataParallel was built."""

    parameters: dict[str, list[Any]]  # the id and the hash of each parameter that is trained
    buffers: bool = True  # whether buffers are broadcast
    holds_buffers: bool = False  # whether the model has any
    nested: str = ""  # the class of a wrapper that the model is or holds already
    gpu: str = ""  # the GPU on which it is, and those that are visible; empty where it is on none


class Sharding(ProbeEvent, kind="sharding"):
    """A model is about to be cut into shards."""

    weights: Digests  # the hashes of its weights; empty where a broadcast makes them equal
    strategy: str = ""  # of FullyShardedDataParallel; HYBRID_SHARD on a mesh of two dimensions


class ModelDivided(ProbeEvent, kind="divided"):
    """A model was divided among the ranks, by its tensors or by its layers."""


class ModelMoved(ProbeEvent, kind="placed"):
    """A wrapped model has changed its device or its type."""

    before: str
    after: str


class NotFinite(ProbeEvent, kind="notfinite"):
    """The first loss or gradient of a process that is nan or infinite."""

    what: str  # the loss, or the gradient of a parameter
    value: str  # nan, inf or -inf
    origin: str  # where it comes from, in words


class StateDictLoad(ProbeEvent, kind="loadsd"):
    """A model has loaded a state dict."""

    strict: Any  # the argument strict
    own: int  # the number of the model's keys
    more: int  # keys that would fit without the prefix of the file's keys
    fewer: int  # keys that would fit with a prefix before the file's keys


Digests = dict[str, str]  # short hashes, by name


class Backward(ProbeEvent, kind="backward"):
    """A backward pass begins."""

    way: str = ""  # the functions and lines that lead to it
    alive: int = 0  # the graphs of earlier losses that are in memory
    loss: float | None = None  # the loss; None where it is no scalar
    scale: float | None = None  # the factor between a mean over samples and the loss, if known
    target_weight: float | None = None  # the one between the loss of a target and the loss
    twice: str = ""  # the activation that must not precede the loss; NO_LOGARITHM for nll_loss
    gathered: CodeLine | None = None  # what has gathered features that are constants of the loss
    weights: str = ""  # a hash of all models, in the first passes, until an optimizer makes a step


class LocalGradients(ProbeEvent, kind="gradients"):
    """A backward pass has ended, and has left these gradients."""

    sums: list[float]  # of a part of each gradient, of which the average is that of all gradients


class LeafGradients(ProbeEvent, kind="leaves"):
    """What this rank's backward passes gave each parameter, before the ranks exchanged it."""

    sums: list[float]  # as in LocalGradients, since the last step


class AutogradCall(ProbeEvent, kind="graded"):
    """The script takes gradients as values."""


class Clipping(ProbeEvent, kind="clip"):
    """Gradients at these addresses were clipped."""

    ptrs: list[int]
    norm: float | None = None  # the norm of all of them; None where it is no plain number


class ZeroGrad(ProbeEvent, kind="zero"):
    """Gradients are set to zero, of an optimizer by its number, or (-1) of a module."""

    optimizer: int


class BeforeStep(ProbeEvent, kind="prestep"):
    """An optimizer step begins; of later steps only some are recorded."""

    optimizer: int  # the number of the optimizer
    step: int  # the number of the step
    clean: bool  # whether the gradients are those of its own backward passes
    grads: Digests  # the hashes of gradients, by name
    norm: float  # the norm of all gradients
    matrix_norm: float  # the norm of those of matrices, or of all if no matrix is trained
    before: Digests  # the hashes of weights
    ids: dict[str, int]  # the ids of parameters
    frozen_names: list[str]  # the parameters with requires_grad=False
    sums: Sequence[float] = ()  # as in LocalGradients
    random: Sequence[str] = ()  # the states of the global generators, with frozen weights


class OptimizerStep(ProbeEvent, kind="step"):
    """An optimizer step was made."""

    optimizer: int  # the number of the optimizer
    step: int  # the number of the step
    lr: list[float]  # the learning rates
    numel: int  # the number of weights
    first_lr: float = 0.0  # the learning rate that the optimizer was made with
    after: Digests = field(default_factory=dict)  # of weights; empty, as all below, without hashes
    state: Digests = field(default_factory=dict)  # the hashes of the optimizer's states
    buffers: Digests = field(default_factory=dict)  # the hashes of the models' buffers
    shapes: Sequence[list[int]] = ()  # the shapes of the parameters
    unheld: Sequence[str] = ()  # parameters of models with a gradient that no optimizer has
    strangers: int = 0  # the number of parameters without a gradient that no model has


class MeanGradient(ProbeEvent, kind="meangradient"):
    """The gradients that an optimizer has got in a run with frozen weights, at its end."""

    optimizer: int  # the number of the optimizer
    steps: int  # how many steps it made
    rows: float  # how many rows models were called with for these steps
    sums: dict[str, list[float]]  # by name: elements of the gradients, times the rows of their step
    squares: float  # the squares of these elements, times the rows of their step, added up


class ScheduleStep(ProbeEvent, kind="sched"):
    """A schedule was stepped."""

    schedule: int  # its id
    cls: str  # its class
    horizon: int | None  # the number of steps after which it ends; None where it has no end
    direct: bool  # whether the user's code called it


class Save(ProbeEvent, kind="save"):
    """The script saves something."""

    path: str  # the file
    existed: bool = False  # whether it was there before
    copied: bool = False  # whether another file holds the weights that were there
    opened: bool = False  # whether the script has opened it itself
    model: bool = False  # whether weights are in it, and so on for the other parts of a training
    optimizer: bool = False
    schedule: bool = False
    random: bool = False
    position: bool = False
    numbered: bool = False  # whether the optimizer's states have numbers, and no names of weights
    bare: bool = False  # whether it is weights alone
    keys: Sequence[str] = ()  # the keys of what is saved
    contents: dict[str, str] = field(default_factory=dict)  # hashes of tensors, and numbers, by key


class Load(ProbeEvent, kind="load"):
    """The script loads a snapshot."""

    path: str
    weights_only: str = "default"
