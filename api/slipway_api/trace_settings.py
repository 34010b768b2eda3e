"""Names and defaults of the settings for traces, for every part: the operator passes them on and exports nothing."""

from typing import Final

ENV_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"  # of replicas: OpenTelemetry's own
ENV_RATIO: Final = "SLIPWAY_TRACE_RATIO"
ENV_SLOW_SECONDS: Final = "SLIPWAY_TRACE_SLOW_SECONDS"
DEFAULT_RATIO: Final = 0.01
DEFAULT_SLOW_SECONDS: Final = 10.0
