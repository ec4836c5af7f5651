"""Settings of the length tagger's process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from length_tagger import DEFAULT_ORDER, TAGGERS
from length_tagger.onnx_form import AUTO, RUNTIMES
from predictor.suggestions import require_choice
from services.settings import Option

if TYPE_CHECKING:
    from services.tagger_server.batches import Batched

ENCODER = "roberta"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggerServerSettings:
    """The estimators, and the file for outcomes."""

    estimator: Annotated[
        str,
        f"Estimators in the order in which they are used, until one has an estimate: {', '.join(TAGGERS)}. Of "
        "estimators joined by |, the one that was closest lately is used.",
    ] = ",".join(DEFAULT_ORDER)
    record: Annotated[str, Option("File to append outcomes to, for `block tagger evaluate`.", metavar="FILE")] = ""

    @property
    def order(self) -> list[str]:
        """The places of the chain; each is one estimator, or several joined by |."""
        return [place.strip() for place in self.estimator.split(",") if place.strip()]

    def require_encoder(self, folder: str) -> None:
        """Refuse an encoder without its estimator, and the estimator without an encoder."""
        used = any(ENCODER in place.split("|") for place in self.order)
        if used and not folder:
            raise ValueError(f"encoder: {ENCODER} needs the folder of a checkpoint")
        if folder and not used:
            raise ValueError(
                f"estimator: with an encoder {ENCODER} must be there, as in client,cached,{ENCODER}|linear"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSettings:
    """The checkpoint of `roberta`, and how it runs."""

    folder: Annotated[
        str,
        Option(
            "Checkpoint of `roberta`: a folder, or small, the package's own. It needs the extra `encoder`.",
            name="encoder",
            metavar="FOLDER",
        ),
    ] = ""
    threads: Annotated[int, Option("Threads that run a batch.", name="encoder_threads")] = 1
    runtime: Annotated[
        str,
        Option(
            "Runtime of the checkpoint: onnx, torch, or auto (onnx if installed and if the checkpoint has that form).",
            name="encoder_runtime",
        ),
    ] = AUTO
    deadline_s: Annotated[
        float, Option("Deadline of an estimate by `roberta`, in seconds.", name="encoder_deadline_s")
    ] = 0.04

    def __post_init__(self) -> None:
        """Refuse settings that no encoder can run with."""
        if self.threads < 1:
            raise ValueError(f"threads: must be at least 1, not {self.threads}")
        require_choice("runtime", self.runtime, RUNTIMES)
        if not 0 < self.deadline_s <= 60:
            raise ValueError(f"deadline_s: must lie above 0 and at most 60, not {self.deadline_s}")

    @property
    def file(self) -> str:
        """The file of the checkpoint that is written last."""
        from services.tagger_server.batches import encoder_folder

        return str(encoder_folder(self.folder) / "block.json")

    def loaded(self) -> Batched:
        """Load the checkpoint."""
        from services.tagger_server.batches import encoder_from

        return encoder_from(self.folder, threads=self.threads, runtime=self.runtime)
