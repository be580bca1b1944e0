"""An output plugin as a client asks for it, made into an output of a decoder."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from pubsub.errors import PubsubError
from walsender.decode.assembly import BATCH, Rules
from walsender.decode.output import Output
from walsender.historic.client_encoding import converter
from walsender.historic.encodings import python_encoding
from walsender.historic.names import TextSettings
from walsender.historic.state import DatabaseFacts
from walsender.historic.upstream import SessionTexts
from walsender.plugins import registered
from walsender.plugins.guard import Guarded
from walsender.plugins.pgoutput import PgoutputOptions, PgoutputPlugin
from walsender.plugins.plugin import OutputPlugin, Plugin, PluginContext, Write
from walsender.plugins.publication import PublicationFilter, Warn
from walsender.plugins.test_decoding import TestDecodingOptions, TestDecodingPlugin
from walsender.rowfilter.compiler import RowFilterCompiler
from walsender.types.registry import outputs_of

_OWN_STEP: Final = 8
"""Changes that a plugin of a user's own, which may be slow, is given at a time."""


@dataclass(frozen=True, slots=True)
class OwnOptions:
    """Options of a plugin of a user's own, which is made with them.  `given`: names and values."""

    plugin: type[Plugin[Any]]
    given: tuple[tuple[str, str], ...]
    two_phase: bool = False


Options = PgoutputOptions | TestDecodingOptions | OwnOptions


@dataclass(frozen=True, slots=True)
class PluginRequest:
    """What is asked of a plugin.

    `two_phase_at`: see Output; a slot with two_phase has one, and keeps the property whatever the plugin's options say
    (pgoutput.c: pgoutput_startup).  `client_encoding`: of the text that pgoutput sends, as the server names it; empty: the
    database's.  `missing_is_error`: a missing publication ends the decoding with any release.
    """

    plugin: str
    options: dict[str, str]
    start: int = 0
    two_phase_at: int | None = None
    client_encoding: str = ""
    missing_is_error: bool = False

    def parse(self, version: int) -> Options:
        """Parse the options.  Raises PubsubError like a server of `version`."""
        options: Options
        if self.plugin == "pgoutput":
            options = PgoutputOptions.parse(self.options, version)
        elif self.plugin == "test_decoding":
            options = TestDecodingOptions.parse(self.options)
        else:
            options = OwnOptions(registered.load(self.plugin), tuple(self.options.items()))
        return options if self.two_phase_at is None else replace(options, two_phase=True)


class PluginMaker:
    """Makes outputs.  Outputs whose texts depend on the same settings share them."""

    def __init__(self, facts: DatabaseFacts) -> None:
        self._facts = facts
        self._texts: dict[object, TextSettings] = {}

    def kind(self, request: PluginRequest, texts: SessionTexts) -> Hashable:
        """Return what is equal for requests that one output can serve from the beginning.  Raises PubsubError."""
        options = request.parse(self._facts.server.version)
        key = (options, request.client_encoding, texts)
        if isinstance(options, OwnOptions):
            # Nobody knows what it keeps: each stream has one of its own.
            return object()
        return (*key, request.start, request.two_phase_at) if _in_parts(options) else key

    def make(
        self,
        request: PluginRequest,
        texts: SessionTexts,
        write: Write,
        on_warning: Warn = lambda _: True,
        *,
        may_go_on: Callable[[], bool] = lambda: True,
        on_failure: Callable[[PubsubError], None] | None = None,
    ) -> Output:
        """Make an output.  Raises PubsubError for wrong options."""
        options = request.parse(self._facts.server.version)
        plugin = self._plugin(request, options, texts, write, on_warning)
        settings = self._settings(plugin, request, texts)
        rules = _rules(plugin, options, request)

        def fail(error: PubsubError) -> None:
            output.fail(error)

        is_own = isinstance(options, OwnOptions)
        if is_own:
            rules = replace(
                rules, skips_origin=_ending(plugin.skips_origin, fail), prepares=_ending(plugin.prepares, fail)
            )
        output = Output(
            plugin,
            settings,
            rules,
            None if is_own else (options, request.client_encoding, texts),
            start=request.start,
            two_phase_at=request.two_phase_at,
            may_go_on=may_go_on,
            on_failure=on_failure,
            step=_OWN_STEP if is_own else BATCH,
        )
        return output

    def _settings(self, plugin: OutputPlugin[Any], request: PluginRequest, texts: SessionTexts) -> TextSettings:
        server = self._facts.server
        encoding = request.client_encoding or server.encoding
        key = (texts, plugin.path, encoding)
        found = self._texts.get(key)
        if found is None:
            found = self._texts[key] = TextSettings(
                texts.dollars,
                plugin.path,
                texts.keywords(self._facts.builtins.keywords),
                encoding,
                {**outputs_of(server.version), **texts.styles.outputs()},
                converter(server.encoding, request.client_encoding),
            )
        return found

    def _plugin(
        self, request: PluginRequest, options: Options, texts: SessionTexts, write: Write, on_warning: Warn
    ) -> OutputPlugin[Any]:
        facts, server = self._facts, self._facts.server
        encoding = python_encoding(server.encoding)
        if isinstance(options, PgoutputOptions):
            compiler = RowFilterCompiler(
                facts.builtins, encoding, c_collation=server.c_collation, version=server.version
            )
            publications = PublicationFilter(
                options.publication_names,
                compiler,
                server.version,
                server.encoding,
                on_warning,
                missing_is_error=request.missing_is_error,
            )
            convert = converter(server.encoding, request.client_encoding)
            return PgoutputPlugin(options, publications, write, encoding, convert)
        keywords = texts.keywords(facts.builtins.keywords)
        if isinstance(options, OwnOptions):
            given = dict(options.given)
            context = PluginContext(given, write, encoding, server.version, options.two_phase, keywords, texts.styles)
            return Guarded(options.plugin, context)
        return TestDecodingPlugin(options, write, encoding, server.version, keywords, texts.styles, texts.path)


_Asked = TypeVar("_Asked")


def _ending(filtered: Callable[[_Asked], bool], fail: Callable[[PubsubError], None]) -> Callable[[_Asked], bool]:
    """Return a filter of a plugin that ends the plugin's output where it raises an error: others are decoded with it."""

    def ask(what: _Asked) -> bool:
        try:
            return filtered(what)
        except PubsubError as error:
            fail(error)
            return False

    return ask


def _in_parts(options: Options) -> bool:
    """Return whether parts of transactions are sent, or prepared ones: then it matters where a stream begins."""
    if isinstance(options, OwnOptions):
        return options.plugin.streaming or options.two_phase
    streaming = options.streaming != "off" if isinstance(options, PgoutputOptions) else options.stream_changes
    return streaming or options.two_phase


_ANY, _NONE = "any", "none"
_NEVER, _ALL, _MOST = "never", "all", "most"


def _rules(plugin: OutputPlugin[Any], options: Options, request: PluginRequest) -> Rules:
    if isinstance(options, OwnOptions):
        own = object()
        return Rules(own, own, plugin.streaming, plugin.skips_origin, plugin.prepares)
    if isinstance(options, PgoutputOptions):
        settled: tuple[Any, ...] = (plugin.streaming, options.origin, _ALL if options.two_phase else _NEVER)
    else:
        origin = _NONE if options.only_local else _ANY
        # test_decoding.c: pg_decode_filter_prepare looks at the name.
        settled = (plugin.streaming, origin, _MOST if options.two_phase else _NEVER)
    key = settled
    if _in_parts(options):
        key = (*settled, request.start, request.two_phase_at)
    return Rules(key, settled, plugin.streaming, plugin.skips_origin, plugin.prepares)
