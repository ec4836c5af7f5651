"""What is learned from the fetches of KV blocks of a followed engine: how fast its link is."""

from __future__ import annotations

import numpy as np

from predictor.correction import Correction, CorrectionRule
from services.predictor_server.followed_engine import FollowedEngine

OF_TRANSFERS = CorrectionRule(momentum=0.8, lowest=0.05, highest=50.0)  # a link's bandwidth is configured by guess


class TransferCorrections:
    """Compares the times of fetches with their predictions, and corrects forecasts by that."""

    def __init__(self) -> None:
        """Know nothing of the engine yet."""
        self.restart()

    def restart(self) -> None:
        """Forget an engine that has ended."""
        self._correction = Correction(rule=OF_TRANSFERS)
        self._num_fetched = 0

    def observe(self, followed: FollowedEngine) -> None:
        """Compare the fetches that have ended with their duration by the engine's configuration."""
        view, num_fetched = followed.view, int(followed.view.state["num_fetched"])
        if num_fetched != self._num_fetched:
            self._num_fetched = num_fetched
            config = followed.replica.engine.config
            alone = set(alone_on_the_link(view.live, view.slots))
            for slot in view.slots[view.live["fetch_ended_s"][view.slots] >= 0].tolist():
                live = view.live[slot]
                if followed.learned[slot] == live["serial"]:
                    continue
                followed.learned[slot] = live["serial"]  # only now are all known that were fetched at the same time
                if slot in alone:
                    num_tokens = int(view.requests["prompt_tokens"][slot] - live["hit_tokens"])
                    self._correction = self._correction.observe(
                        predicted_s=config.transfer_s(num_tokens, -(-num_tokens // config.block_size)),
                        real_s=float(live["fetch_ended_s"] - live["fetch_started_s"]),
                    )
        followed.replica.engine.set_transfer_pace(self._correction.factor)


def alone_on_the_link(live: np.ndarray, slots: np.ndarray) -> list[int]:
    """Return the slots of requests whose blocks were fetched while no others were, so that one can predict the time."""
    started_s, ended_s = live["fetch_started_s"][slots], live["fetch_ended_s"][slots]
    has_started = started_s >= 0
    slots, started_s, ended_s = slots[has_started], started_s[has_started], ended_s[has_started]
    until_s = np.where(ended_s >= 0, ended_s, np.inf)
    return [
        int(slot)
        for slot, start_s, end_s in zip(slots, started_s, ended_s, strict=True)
        if end_s >= 0 and np.count_nonzero((started_s < end_s) & (until_s > start_s)) == 1
    ]
