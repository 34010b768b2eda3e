"use strict";
// Everything from the server is put on the page as text, never as markup.
const POLL_MS = 2000, KEPT = 150;
const byId = (id) => document.getElementById(id);
const history = { requests: [], kv: [], open: [], replicas: [] };
let token = takeToken(), stop = null, before = null, timer = 0;

function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    window.history.replaceState(null, "", location.pathname); // out of the address bar, and of bookmarks
  }
  return sessionStorage.getItem("token") || "";
}

function ask(path, options = {}) {
  return fetch(path, { ...options, headers: { ...options.headers, "x-slipway-admin-token": token } });
}

function make(tag, text, kind) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

function fill(table, headings, rows, empty) {
  if (!rows.length) return table.replaceChildren(make("caption", empty, "empty"));
  const head = make("tr"), parts = [make("thead"), make("tbody")];
  for (const heading of headings) {
    const cell = make("th", heading);
    cell.scope = "col";
    head.append(cell);
  }
  parts[0].append(head);
  for (const row of rows) {
    const line = make("tr");
    for (const value of row) {
      const cell = make("td");
      cell.append(value instanceof Node ? value : document.createTextNode(value ?? ""));
      line.append(cell);
    }
    parts[1].append(line);
  }
  table.replaceChildren(...parts);
}

const seconds = (value) => (value === null || value === undefined ? "" : value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`);
const percent = (value) => (value === null || value === undefined ? "unknown" : `${Math.round(value * 100)} %`);
const short = (name) => String(name).split("/").pop();
const many = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const reasons = { only: "only candidate", turn: "its turn", best_score: "best score" };
const time = (text) => (text ? new Date(text).toLocaleTimeString() : "");

function usage(value) {
  const box = make("span", "", "whole"), meter = document.createElement("meter");
  if (value === null || value === undefined) return make("span", "unknown", "empty");
  Object.assign(meter, { min: 0, max: 1, low: 0.7, high: 0.9, optimum: 0, value });
  meter.setAttribute("aria-label", "KV usage");
  box.append(meter, ` ${percent(value)}`);
  return box;
}

function service(one) {
  const card = make("article"), title = make("h3", one.model);
  const desired = one.desired === null ? "" : `, ${one.desired} desired`;
  const facts = [`${one.service}: ${one.replicas.length} ready${desired}`];
  if (one.held) facts.push(`${one.held} held for a replica`);
  if (one.suspended) facts.push("suspended");
  if (one.stalled) facts.push(`stalled: ${one.stalled}`);
  card.append(title, make("p", facts.join(" · ")));
  const table = make("table");
  fill(table, ["Replica", "Revision", "KV usage", "Queued", "Open", "Tokens", "Adapters", "State"],
    one.replicas.map((r) => [make("span", short(r.pod), "whole"), r.revision, usage(r.kvUsage), r.queued, r.open, r.tokens, r.adapters.join(", "),
      make("span", r.ejected ? "ejected" : "serving", r.ejected ? "bad whole" : "good whole")]), "No replica is ready.");
  const wide = make("div", undefined, "scroll");
  wide.append(table);
  card.append(wide);
  const inherited = (one.templates || []).filter((t) => t.blocks.length).map((t) => `${t.blocks.join(", ")} from ${t.name}`);
  if (inherited.length) card.append(make("p", `Inherits ${inherited.join(" · ")}`));
  if (one.rollout && (one.rollout.isRunning || one.rollout.failed)) {
    const r = one.rollout, parts = [];
    if (r.isRunning) parts.push(`Rollout: step ${r.step}, ${r.weight} % of the traffic`);
    if (r.gate) parts.push(`gates ${r.gate}`);
    if (r.failures) parts.push(`${many(r.failures, "failure")} of the analysis`);
    if (r.failed) parts.push(`${r.failed} was rolled back`);
    for (const m of r.metrics) parts.push(`${m.type} ${m.verdict} (new ${m.canary ?? "unknown"}, stable ${m.stable ?? "unknown"})`);
    card.append(make("p", parts.join(" · ")));
  }
  if (one.revisions.length > 1) card.append(make("p", `Weights: ${one.revisions.map((r) => `${r.hash} ${r.weight} %`).join(" · ")}`));
  const signals = (one.signals || []).map((s) => `${s.type} ${s.value ?? "unknown"} of ${s.target}`);
  if (signals.length) card.append(make("p", `Autoscaler: ${signals.join(" · ")}`));
  for (const c of one.conditions || []) {
    const isBad = (c.type === "Stalled") === (c.status === "True") && ["Ready", "Stalled"].includes(c.type);
    if (isBad) card.append(make("p", `${c.type}: ${c.reason}: ${c.message}`, "warn"));
  }
  return card;
}

function plot(title, values, unit) {
  const figure = make("figure"), caption = make("figcaption"), last = values[values.length - 1], known = values.filter((v) => v !== null);
  const now = last === null ? "unknown" : `${unit === "%" ? Math.round(last) : Math.round(last * 10) / 10}${unit ? ` ${unit}` : ""}`;
  caption.append(make("span", title), make("strong", now));
  const ns = "http://www.w3.org/2000/svg", svg = document.createElementNS(ns, "svg"), most = unit === "%" ? 100 : Math.max(1, ...known) * 1.1;
  svg.setAttribute("viewBox", "0 0 100 40");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${title}: now ${now}, highest ${Math.max(0, ...known).toFixed(1)}`);
  const place = (i) => ((i + KEPT - values.length) / (KEPT - 1) * 100).toFixed(2);
  for (let start = 0; start < values.length; start++) {
    if (values[start] === null) continue; // an unknown value is a gap, not a zero
    let end = start;
    while (end + 1 < values.length && values[end + 1] !== null) end++;
    const points = values.slice(start, end + 1).map((v, i) => `${place(start + i)} ${(39 - v / most * 37).toFixed(2)}`).join("L");
    for (const [kind, d] of [["area", `M${place(start)} 40L${points}L${place(end)} 40Z`], ["line", `M${points}`]]) {
      const path = document.createElementNS(ns, "path");
      path.setAttribute("class", kind);
      path.setAttribute("d", d);
      svg.append(path);
    }
    start = end;
  }
  figure.append(caption, svg);
  return figure;
}

function keep(name, value) {
  history[name].push(value);
  if (history[name].length > KEPT) history[name].shift();
}

function show(data) {
  const now = performance.now();
  keep("requests", before ? Math.max(0, data.endedRequests - before.ended) / (now - before.at) * 1000 : null);
  before = { ended: data.endedRequests, at: now };
  const replicas = data.services.flatMap((s) => s.replicas), known = replicas.filter((r) => r.kvUsage !== null);
  keep("kv", known.length ? known.reduce((sum, r) => sum + r.kvUsage, 0) / known.length * 100 : null);
  keep("open", data.openRequests);
  keep("replicas", replicas.length);
  byId("plots").replaceChildren(plot("Requests ended", history.requests, "/s"), plot("Open requests", history.open, ""),
    plot("KV usage, mean", history.kv, "%"), plot("Ready replicas", history.replicas, ""));
  byId("service-list").replaceChildren(...(data.services.length ? data.services.map(service) : [make("p", "There is no InferenceService yet.", "empty")]));
  fill(byId("adapters"), ["Adapter", "Base", "Alias", "Loaded on", "Problem"], data.adapters.map((a) => [a.model, short(a.service), a.alias,
    many(a.loaded, "replica"), a.stalled ? make("span", a.stalled, "bad") : ""]), "There are no adapters.");
  fill(byId("pools"), ["Pool", "Pods"], data.pools.map((p) => [p.pool, Object.entries(p.pods).map(([s, n]) => `${n} ${s}`).join(", ")]), "There are no warm pools.");
  fill(byId("events"), ["Time", "Service", "Event", "Detail"], data.events.map((e) => [time(e.time), e.service, e.event, e.text]), "There are no events yet.");
  fill(byId("requests"), ["Time", "Request", "Model", "Replica", "Picked as", "Compared scores", "First byte", "Total", "Tokens in / cached / out", "Status"],
    data.requests.map((r) => {
      const last = r.attempts[r.attempts.length - 1];
      const more = r.attempts.length > 1 ? ` (attempt ${r.attempts.length})` : "";
      return [time(r.startedAt), r.requestId, r.adapter || r.model, short(r.endpoint) + more, last ? reasons[last.pickedFor] : "",
        last ? last.considered.map((c) => `${short(c.endpoint)} ${c.score.toFixed(2)}`).join(", ") : "", seconds(r.firstByteAt), seconds(r.endedAt), `${r.inputTokens} / ${r.cachedTokens} / ${r.outputTokens}`,
        make("span", `${r.status}${r.error ? ` ${r.error}` : ""}`, r.status < 400 ? "good" : "bad")];
    }), "No request has ended yet.");
  const models = [...data.services.map((s) => s.model), ...data.adapters.map((a) => a.model)], select = byId("model"), was = select.value;
  if (models.join("\n") !== [...select.options].map((o) => o.value).join("\n")) {
    select.replaceChildren(...models.map((m) => new Option(m, m)));
    if (models.includes(was)) select.value = was;
  }
  byId("key-field").hidden = data.openToAnyone;
  state(`${data.gateway || "gateway"} · ${data.synced ? "routes are current" : "routes are not listed yet"} · ${time(data.now)}`);
}

function state(text, isBad = false) {
  byId("state").className = isBad ? "bad" : "";
  if (byId("state").textContent !== text) byId("state").textContent = text;
}

async function poll() {
  clearTimeout(timer);
  try {
    const answer = await ask("/console/data");
    if (answer.status === 401) return login(token ? "The token is not valid. It may have been rotated." : "");
    byId("login").hidden = true;
    byId("main").hidden = false;
    show(await answer.json());
  } catch (error) {
    state("The gateway does not answer. Retrying.", true);
  }
  timer = setTimeout(poll, POLL_MS);
}

function login(message) {
  byId("main").hidden = true;
  byId("login").hidden = false;
  state(message || "A token is needed.", Boolean(message));
  byId("token").focus();
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value.trim();
  sessionStorage.setItem("token", token);
  poll();
});

byId("stop").addEventListener("click", () => stop && stop.abort());
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("chat").requestSubmit();
});
byId("chat").addEventListener("submit", async (event) => {
  event.preventDefault();
  stop = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  byId("answer").textContent = "";
  byId("answered").replaceChildren();
  try {
    await chat(byId("prompt").value, stop.signal);
  } catch (error) {
    byId("answer").append(error.name === "AbortError" ? " [stopped]" : ` [${error.message}]`);
  }
  byId("send").disabled = false;
  byId("stop").disabled = true;
});

async function chat(prompt, signal) {
  const headers = { "Content-Type": "application/json" };
  if (byId("key").value) headers.Authorization = `Bearer ${byId("key").value}`;
  const body = { model: byId("model").value, messages: [{ role: "user", content: prompt }], stream: true, stream_options: { include_usage: true } };
  const answer = await ask("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", usage = null;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const line of events.flatMap((text) => text.split("\n")).filter((text) => text.startsWith("data: ") && text !== "data: [DONE]")) {
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      byId("answer").append(event.choices?.[0]?.delta?.content ?? "");
    }
  }
  await answered(answer.headers, usage);
}

async function answered(headers, usage) {
  const id = headers.get("x-request-id"), found = await (await ask(`/debug/requests?id=${encodeURIComponent(id)}`)).json();
  const account = found.requests[found.requests.length - 1] || {}, last = (account.attempts || []).pop();
  const best = last && last.considered.find((one) => one.endpoint === last.endpoint), prompt = usage ? usage.prompt_tokens : account.inputTokens;
  const facts = {
    Replica: account.endpoint, Revision: account.revision || headers.get("x-slipway-revision"), Adapter: account.adapter || "none",
    "Picked as": last ? `${reasons[last.pickedFor]}${best ? `, score ${best.score}` : ""}` : "",
    "From the prefix cache": `${usage?.prompt_tokens_details?.cached_tokens ?? 0} of ${prompt} prompt tokens`,
    "First byte": seconds(account.firstByteAt), "Request ID": id,
  };
  byId("answered").replaceChildren(...Object.entries(facts).flatMap(([name, value]) => [make("dt", name), make("dd", value)]));
}

addEventListener("hashchange", () => { token = takeToken(); poll(); });
poll();
