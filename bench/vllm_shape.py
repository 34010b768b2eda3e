"""A server in vLLM's shape that streams on schedule: the recorded metrics page and routes, and tokens with their time.

`GET /counted` reports the requests for tokens that came. See `bench.upstream` for the streams.
"""

from aiohttp import web

from bench import upstream
from bench.peer_main import Addresses, serve_until_killed
from tests.agent.stand_in import StandIn


class Scheduled(StandIn):
    """The stand-in with streams that show when each token was written."""

    generations = 0

    def app(self) -> web.Application:
        """The application."""
        app = super().app()
        app.router.add_post("/v1/chat/completions", self.stream)
        app.router.add_get("/counted", self.counted)
        return app

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Stream on schedule."""
        self.generations += 1
        self.running += 1
        try:
            return await upstream.answer(request)
        finally:
            self.running -= 1

    async def counted(self, _: web.Request) -> web.Response:
        """How many requests for tokens came."""
        return web.json_response({"generations": self.generations})


async def ready(_: web.Request) -> web.Response:
    """The server answers."""
    return web.Response()


async def serve(at: Addresses) -> None:
    """Begin to serve."""
    app, admin = Scheduled().app(), web.Application()
    admin.router.add_get("/ready", ready)
    for one, port in ((app, at.port), (admin, at.admin_port)):
        runner = web.AppRunner(one, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, at.host, port, backlog=1024).start()


if __name__ == "__main__":
    serve_until_killed("vllm_shape", serve)
