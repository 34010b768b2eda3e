"""nginx from its Debian package, as a reverse proxy in front of one server: for tests, and as a peer of benchmarks."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.packages import program, version_of
from bench.servers import Server, free_ports, served_by

# What `docs/gateway.md` recommends is in `location /`; buffering is left at nginx's default, which is on.
CONFIG = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections {connections}; }}
http {{
  access_log off;
  {http}
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream gateway {{ server {upstream}; keepalive 64; }}
  server {{
    listen 127.0.0.1:{port}; listen 127.0.0.1:{admin_port};
    client_max_body_size 16m;
    proxy_http_version 1.1;
    location = /ready {{ return 200; }}
    location / {{
      proxy_pass http://gateway;
      proxy_set_header Connection "";
      proxy_set_header Host $host;
      proxy_read_timeout 660s;
      {directives}
    }}
  }}
}}
"""


@contextmanager
def an_nginx(upstream: str, *directives: str, http: str = "", connections: int = 4096) -> Iterator[Server]:
    """A running nginx in front of `upstream` (a URL), with more directives for its location; raises NoProgramError.

    `http` is text for its block of that name.
    """
    binary = program("nginx", "usr/sbin/nginx")
    with tempfile.TemporaryDirectory(prefix="slipway-nginx-") as folder:
        port, admin_port = free_ports(2)
        config = Path(folder) / "nginx.conf"
        config.write_text(
            CONFIG.format(
                folder=folder,
                upstream=upstream.removeprefix("http://"),
                port=port,
                admin_port=admin_port,
                http=http,
                connections=connections,
                directives=" ".join(f"{directive};" for directive in directives),
            )
        )
        command = [str(binary), "-c", str(config), "-e", f"{folder}/error.log"]
        subprocess.run([*command, "-t", "-q"], check=True)
        version = f"nginx {version_of(binary, '-v')}"
        with served_by(command, Path(folder) / "output.log", {}, (port, admin_port), version=version) as server:
            yield server
