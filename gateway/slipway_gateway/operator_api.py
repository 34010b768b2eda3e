"""The two answers of the admin port that the operator polls: demand for services, and outcomes by revision."""

from aiohttp import web

from slipway_api.gateway_api import LONGEST_DEMAND_WAIT_SECONDS
from slipway_gateway.fleet import Fleet
from slipway_gateway.outcomes import Outcomes


class OperatorApi:
    """The handlers of `/internal/demand` and `/internal/outcomes`; the caller checks the token."""

    def __init__(self, fleet: Fleet, outcomes: Outcomes) -> None:
        self._fleet = fleet
        self._outcomes = outcomes

    async def demand(self, request: web.Request) -> web.Response:
        """The demand, once its version is not `after`, or after `wait_seconds`."""
        try:
            after = int(request.query["after"]) if "after" in request.query else None
            seconds = float(request.query.get("wait_seconds", LONGEST_DEMAND_WAIT_SECONDS))
        except ValueError:
            return web.json_response({"error": "after and wait_seconds are numbers"}, status=400)
        if after is not None:
            await self._fleet.demand.wait(after, max(0.0, min(seconds, LONGEST_DEMAND_WAIT_SECONDS)))
        report = self._fleet.demand.report(self._fleet.table.services)
        return web.Response(body=report.wire(), content_type="application/json")

    async def outcomes(self, request: web.Request) -> web.Response:
        """The outcomes since the gateway's start."""
        table = self._fleet.table
        report = self._outcomes.report(table.has_revision, table.services.__contains__)
        return web.Response(body=report.wire(), content_type="application/json")
