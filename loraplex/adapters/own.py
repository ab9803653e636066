"""What an adapter has of its own, in place of the base model's: whole weights, rows of tokens, a vocabulary.

    modules_to_save, LN tuning   <module>.weight is the adapter's, whole; of a linear, its bias, too
    trained tokens               rows of the embedding or the head, those of the ids that the configuration lists
    saved layers                 <module>.base_layer.weight, or <module>.weight without modules_to_save: peft saves the
                                 embedding and the head as they were when they are targets or when tokens were added,
                                 and puts them into the base model when it reads the adapter
    vocabulary                   as many tokens as these have rows; more than the base's, or fewer

A head that is tied has the embedding's weight (LoraTarget.is_tied). Then peft puts a saved layer into both, and trained
tokens of the embedding count for the head. A copy of modules_to_save is for its own module alone, and for both with
ensure_weight_tying. What is one tensor in peft may be two in the file: these must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from loraplex.adapters.files import TensorEntry
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.kinds import BASE_BIAS, BASE_WEIGHT, BIAS_COPY, COPY, OWN_PARTS, TOKENS, WEIGHT, Kind, TensorName
from loraplex.core import LoraTarget, ShardKind
from loraplex.errors import shown

WITHOUT_HEAD = (Kind.IA3,)
"""Kinds that are not served on the output layer, as DoRA is not: what they multiply is not there for the head."""


@dataclass(frozen=True, slots=True)
class BaseModule:
    """One module of the base model under its checkpoint name; sizes are the whole checkpoint's.

    is_tied: of a head, whether its weight is the embedding's. is_lora_only, is_expert: whether its target has a
    parameter, an expert.
    """

    in_features: int
    out_features: int
    has_bias: bool
    kind: ShardKind = ShardKind.REPLICATED
    is_tied: bool = False
    is_lora_only: bool = False
    is_expert: bool = False

    @classmethod
    def all_of(cls, target: LoraTarget) -> Iterator[tuple[str, BaseModule]]:
        for part in target.slices:
            sizes = target.full_in_features, part.full_out_features
            yield (
                part.module_name,
                cls(
                    *(*sizes, part.has_bias, target.kind, target.is_tied),
                    *(bool(target.parameter), target.expert is not None),
                ),
            )

    @property
    def is_linear(self) -> bool:
        return self.kind not in (ShardKind.EMBEDDING, ShardKind.HEAD, ShardKind.NORM)

    def weight_shape(self, vocab_size: int) -> tuple[int, ...]:
        if self.kind is ShardKind.NORM:
            return (self.out_features,)
        if self.kind is ShardKind.EMBEDDING:
            return vocab_size, self.out_features
        return vocab_size if self.kind is ShardKind.HEAD else self.out_features, self.in_features


@dataclass(frozen=True, slots=True)
class OwnPart:
    """Of one module. weight: all of it; tokens: the rows of token_ids, which are put into it or alone are changed."""

    weight: TensorName | None = None
    tokens: TensorName | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Equal:
    """Two tensors that are one in peft. is_transposed: A and B of a head are those of its embedding, transposed."""

    first: TensorName
    second: TensorName
    is_transposed: bool = False


@dataclass
class OwnParts:
    """What a file has of its own, by module. shapes: of the tensors that are used; equal: what must be the same.

    vocab_size: of the adapter; 0 where the base has neither an embedding nor a head. targeted: what the kind itself
    changes; ensure_weight_tying adds the other end. is_whole: as of `TensorCheck`.
    """

    helper: PEFTHelper
    base: Mapping[str, BaseModule]
    names: Mapping[TensorName, TensorEntry]
    targeted: frozenset[str]
    is_whole: bool = True
    parts: dict[str, OwnPart] = field(default_factory=dict)
    shapes: dict[TensorName, tuple[int, ...]] = field(default_factory=dict)
    equal: list[Equal] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    saved: frozenset[str] = frozenset()
    vocab_size: int = 0
    base_vocab_size: int = 0

    def __post_init__(self) -> None:
        self._embedding = self._only(ShardKind.EMBEDDING)
        self._head = self._only(ShardKind.HEAD)
        ends = tuple(module for module in (self._embedding, self._head) if module)
        self._ends = ends
        self._is_tied = len(ends) == 2 and self.base[self._head].is_tied
        self._tie_targets()
        self._find_saved()
        trained, from_embedding = self._trained()
        self._check_conflicts(frozenset(trained), from_embedding)
        self._find_vocab_size(trained)
        sources = self._saved_layers()
        for module in sorted({*self.saved, *trained, *sources}):
            weight = self._copy_of(module) if module in self.saved else sources.get(module)
            ids = trained.get(module, ())
            tokens = self._tokens_of(self._embedding if module in from_embedding else module, ids) if ids else None
            if tokens is not None:
                self._may_equal(tokens, TensorName(module, TOKENS))
            if weight or tokens:
                self.parts[module] = OwnPart(weight, tokens, ids)
        self._check_added_tokens()
        self._check_activation()

    def _only(self, kind: ShardKind) -> str:
        return next((module for module, base in self.base.items() if base.kind is kind), "")

    # ------------------------------------------------------------------------------------------------ what is named

    def _tie_targets(self) -> None:
        """With ensure_weight_tying, A and B of the one end are those of the other."""
        if self._is_tied and self.helper.ensure_weight_tying and not self.targeted.isdisjoint(self._ends):
            self.targeted |= frozenset(self._ends)
            a, b = (TensorName(self._embedding, f"lora_embedding_{part}") for part in "AB")
            self.equal.append(Equal(b, TensorName(self._head, "lora_A.weight"), is_transposed=True))
            self.equal.append(Equal(a, TensorName(self._head, "lora_B.weight"), is_transposed=True))

    def _find_saved(self) -> None:
        named = self.helper.match_saved(tuple(self.base))
        hits = frozenset(entry for entries in named.values() for entry in entries)
        for entry in self.helper.modules_to_save:
            if entry not in hits and self.is_whole:
                text = "names no module of the base model that an adapter can have of its own; remove it"
                self.reasons.append(f"modules_to_save: {shown(entry)} {text}")
        self.saved = frozenset(named)
        if self.helper.kind is Kind.LN_TUNING:
            self.saved |= self.helper.match_modules(tuple(self.base))
        if self._is_tied and self.helper.ensure_weight_tying and not self.saved.isdisjoint(self._ends):
            self.saved |= frozenset(self._ends)
            self.equal.append(Equal(TensorName(self._embedding, WEIGHT), TensorName(self._head, WEIGHT)))

    def _trained(self) -> tuple[dict[str, tuple[int, ...]], frozenset[str]]:
        """(ids by module, the modules whose rows are the embedding's)."""
        by_end = self.helper.token_indices or {}
        if self.helper.kind is Kind.TRAINABLE_TOKENS:
            found = dict.fromkeys(self.helper.match_modules(tuple(self.base)), by_end[""])
        else:
            named = self.helper.match_trained_tokens(tuple(self.base))
            self.reasons.extend(
                f"trainable_token_indices names {module!r} {len(ends)} times; keep one"
                for module, ends in named.items()
                if len(ends) > 1
            )
            unknown = by_end.keys() - {end for ends in named.values() for end in ends} if self.is_whole else ()
            for end in unknown:
                text = "names no module of the base model that has tokens"
                self.reasons.append(f"trainable_token_indices: {shown(end)} {text}; remove it")
            found = {module: by_end[min(ends)] for module, ends in named.items()}
        for module in sorted(found.keys() - set(self._ends)):
            self.reasons.append(f"{module}: tokens can be trained of the embedding and of the output layer only")
        found = {module: ids for module, ids in found.items() if module in self._ends}
        if not self._is_tied or self._embedding not in found:
            return found, frozenset()
        ids = found[self._embedding]
        if found.get(self._head, ids) != ids:
            if self.helper.ensure_weight_tying:
                text = "with other tokens of lm_head than of embed_tokens: peft does not load that"
                self.reasons.append(f"ensure_weight_tying=True {text}; train the same")
            return found, frozenset()
        return {**found, self._head: ids}, frozenset([self._head])

    def _check_conflicts(self, trained: frozenset[str], from_embedding: frozenset[str]) -> None:
        """What peft does not construct, or is not served. A LoRA of a tied head adds to the embedding's rows."""
        named = trained - (from_embedding - self.helper.match_trained_tokens(tuple(self.base)).keys())
        for first, second, text in (
            (self.saved, self.targeted, "modules_to_save and target_modules both name"),
            (self.saved, trained, "modules_to_save and the trained tokens both name"),
            (self.targeted, named, "target_modules and the trained tokens both name"),
        ):
            self.reasons.extend(
                f"{text} {each!r}: peft does not load that; train one" for each in sorted(first & second)
            )
        helper = self.helper
        of_head = "use_dora" if helper.use_dora else str(helper.kind) if helper.kind in WITHOUT_HEAD else ""
        of_head = "alora_invocation_tokens" if helper.invocation_tokens else of_head
        of_embedding = str(helper.kind) if helper.kind is not Kind.LORA else ""
        of_embedding = "use_dora" if helper.use_dora else "lora_bias" if helper.lora_bias else of_embedding
        of_embedding = "alora_invocation_tokens" if helper.invocation_tokens else of_embedding
        for module, odd in ((self._head, of_head), (self._embedding, of_embedding)):
            if odd and module in self.targeted:
                self.reasons.append(
                    f"target_modules names {module!r}: {odd} of it is not supported; train a LoRA of it"
                )

    # ------------------------------------------------------------------------------------------------ the vocabulary

    def _find_vocab_size(self, trained: Mapping[str, tuple[int, ...]]) -> None:
        """As many tokens as the file's tensors of the embedding and the head have rows."""
        if not self._ends:
            return
        embedding = self.base.get(self._embedding)
        self.base_vocab_size = embedding.in_features if embedding else self.base[self._head].out_features
        found = {size: name for name, entry in self.names.items() if (size := self._rows_of(name, entry))}
        if len(found) > 1:
            listed = ", ".join(f"{size} of {found[size].canonical!r}" for size in sorted(found))
            self.reasons.append(f"the tensors of the embedding and the output layer are for vocabularies of {listed}")
        self.vocab_size = max(found, default=self.base_vocab_size)
        for module, ids in trained.items():
            self._check_ids(module, ids, is_known=bool(found))

    def _rows_of(self, name: TensorName, entry: TensorEntry) -> int:
        """0 for a tensor that has no row, or no column, for each token."""
        if name.module not in self._ends or len(entry.shape) != 2 or 0 in entry.shape:
            return 0  # a tensor without elements may claim any size
        if name.part == "lora_embedding_A":
            return entry.shape[1]
        return entry.shape[0] if name.part in (WEIGHT, BASE_WEIGHT, COPY, "lora_B.weight", "lora_B") else 0

    def _check_ids(self, module: str, ids: tuple[int, ...], is_known: bool) -> None:
        """Trained tokens alone may be all that is added: then each of the new ones is among them."""
        beyond = sorted(each for each in ids if each >= self.vocab_size)
        if not beyond:
            return
        if is_known or beyond[0] > self.base_vocab_size or beyond[-1] - beyond[0] >= len(beyond):
            text = f"its vocabulary has {self.vocab_size} tokens; save it with save_embedding_layers=True"
            self.reasons.append(f"{module}: token {beyond[0]} is trained, but {text}")
        elif self.vocab_size in (self.base_vocab_size, beyond[-1] + 1):
            self.vocab_size = beyond[-1] + 1

    def _check_added_tokens(self) -> None:
        """Each end needs rows for them, since peft's user would make some at random."""
        if self.vocab_size <= self.base_vocab_size:
            return
        for module in self._ends:
            part, added = self.parts.get(module, OwnPart()), range(self.base_vocab_size, self.vocab_size)
            if part.weight is None and (len(added) > len(part.token_ids) or not set(added) <= set(part.token_ids)):
                text = f"the file has no rows of it for the {len(added)} tokens that the adapter adds"
                remedy = "save it with save_embedding_layers=True"
                if self.targeted.intersection(self._ends) - {module}:  # peft saves what is targeted then, and no other
                    remedy = "train with both ends in target_modules, or with this one in modules_to_save"
                self.reasons.append(f"{module}: {text}; {remedy}")

    def _check_activation(self) -> None:
        """Of an aLoRA, rows before the invocation are the base's, from the embedding to the KV."""
        if not self.helper.invocation_tokens:
            return
        beyond = sorted({each for each in self.helper.invocation_tokens if each >= self.vocab_size > 0})
        if beyond:
            text = f"token {beyond[0]} is in no prompt, and it would never act: its vocabulary has {self.vocab_size}"
            self.reasons.append(f"alora_invocation_tokens: {text} tokens; give the ids of the training")
        for module in sorted(self.parts.keys() - self.saved):
            text = "a weight of its own would change the rows before the invocation"
            self.reasons.append(f"{module}: {text}; save it with save_embedding_layers=False")

    # -------------------------------------------------------------------------------------------- tensors of the file

    def _saved_layers(self) -> dict[str, TensorName]:
        """What the base's layer is replaced by, by module; of a tied pair one is for both."""
        sources: dict[str, TensorName] = {}
        for module in self._ends:
            parts = (BASE_WEIGHT,) if module in self.saved else (BASE_WEIGHT, WEIGHT)
            names = (TensorName(module, part) for part in parts)
            source = next((name for name in names if name in self.names), None)
            if source is not None:
                self._use(module, source)
                sources[module] = source
        if self._is_tied and sources:
            if len(sources) == 2:
                self.equal.append(Equal(sources[self._embedding], sources[self._head]))
            sources = {module: next(iter(sources.values())) for module in self._ends}
        return {module: source for module, source in sources.items() if module not in self.saved}

    def _copy_of(self, module: str) -> TensorName | None:
        name = TensorName(module, WEIGHT)
        if name in self.names:
            self._use(module, name)
            self._may_equal(name, TensorName(module, COPY))
            self._use_biases(module)
            return name
        self.reasons.append(
            f"{module}: the file has no weight, which {self._calling} calls for; save the adapter again"
        )
        return None

    def _use_biases(self, module: str) -> None:
        """Those beside the module's own, which is checked with all biases."""
        bias, copy, old = (TensorName(module, part) for part in ("bias", BIAS_COPY, BASE_BIAS))
        present = {copy, old} & self.names.keys() if bias in self.names else set()
        self.shapes.update(dict.fromkeys(present, (self.base[module].out_features,)))
        if copy in present:
            self.equal.append(Equal(bias, copy))

    @property
    def _calling(self) -> str:
        return "target_modules" if self.helper.kind is Kind.LN_TUNING else "modules_to_save"

    def _tokens_of(self, module: str, ids: tuple[int, ...]) -> TensorName | None:
        name, base = TensorName(module, TOKENS), self.base[module]
        if name in self.names:
            self.shapes[name] = len(ids), base.weight_shape(0)[1]
            return name
        self.reasons.append(f"{module}: the file has no {TOKENS} for its {len(ids)} trained tokens; save it again")
        return None

    def _may_equal(self, first: TensorName, second: TensorName) -> None:
        """The second may be there, too, and is then the same."""
        if second != first and second in self.names:
            self.equal.append(Equal(first, second))
            self.shapes[second] = self.shapes[first]

    def _use(self, module: str, name: TensorName) -> None:
        self.shapes[name] = self.base[module].weight_shape(self.vocab_size)

    def unused(self) -> list[TensorName]:
        """The tensors that no configuration calls for."""
        return [name for name in self.names if name.part in OWN_PARTS and name not in self.shapes]
