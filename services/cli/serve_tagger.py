"""`block serve tagger`: predicts the lengths of responses."""

from __future__ import annotations

import click

from length_tagger.settings import TaggerSettings
from services.cli.settings_options import SettingValues, server_of, settings_options
from services.logs import LogSettings
from services.rpc.settings import ServerSettings
from services.security.settings import TlsSettings
from services.settings import PORTS, CommandSettings, SettingsPart
from services.tagger_server.settings import EncoderSettings, TaggerServerSettings

SETTINGS = CommandSettings(
    "tagger",
    SettingsPart(ServerSettings, defaults={"port": PORTS["tagger"]}),
    LogSettings,
    TlsSettings,
    TaggerServerSettings,
    EncoderSettings,
    TaggerSettings,
)


@click.command()
@settings_options(SETTINGS)
def tagger(given: SettingValues) -> None:
    """Serve the length tagger, which predicts how long responses will be (gRPC service block.v1.LengthTagger)."""
    from length_tagger import TAGGERS, UnknownEstimatorError, chained
    from predictor.suggestions import did_you_mean
    from services.tagger_server.server import serve

    server = server_of(given)
    settings = given.make(TaggerSettings)
    own = given.make(TaggerServerSettings)
    encoder = given.make(EncoderSettings)
    own.require_encoder(encoder.folder)
    try:
        chain = chained(own.order, settings)
    except UnknownEstimatorError as error:
        raise ValueError(f"{error}{did_you_mean(error.name, TAGGERS)}") from None
    serve(
        chain,
        server,
        linear_model=settings.linear_model,
        encoder=encoder if encoder.folder else None,
        record=own.record,
    )
