// The page: it asks for status.json every few seconds, and shows what it gets.  Whatever comes from there (names, errors, events) may
// hold anything, and goes into the page as text only: textContent, never markup.

import { Chart } from "./charts.js";

const EVERY = 5000;
const $ = (id) => document.getElementById(id);
const asked = { search: "", show: "all", order: "attention", offset: 0, limit: innerWidth < 720 ? 15 : 25, subscriptions: 0, span: "hour" };
let paused = false, timer = 0, asking = null, answered = null;

// Words

const whole = new Intl.NumberFormat("en-US");
const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

const count = (value) => (value === null || value === undefined ? "–" : whole.format(value));
const compact = (value) => (value < 100 ? String(Number(value.toFixed(1))) : value < 100000 ? count(Math.round(value)) : short.format(value));

function memory(one) {
  const heap = one.heap_max === null ? "" : `, heap ${size(one.heap_used)} of ${size(one.heap_max)}`;
  return `memory: Python ${size(one.python)}, JVM ${size(one.jvm)}${heap}`;
}

function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  if (bytes < 0) return `−${size(-bytes)}`;
  let value = bytes;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1024) return unit === "B" ? `${Math.round(value)} B` : `${value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TB`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 9.95) return `${Number(seconds.toFixed(1))} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Number((seconds / 60).toFixed(seconds < 600 ? 1 : 0))} min`;
  if (seconds < 129600) return `${Number((seconds / 3600).toFixed(1))} h`;
  return `${Math.round(seconds / 86400)} d`;
}

function clock(text) {
  const time = new Date(text);
  const sameDay = time.toDateString() === new Date(answered.time).toDateString();
  return time.toLocaleString("en-GB", sameDay ? { timeStyle: "medium" } : { dateStyle: "medium", timeStyle: "medium" });
}

function ago(text) {
  const seconds = (new Date(answered.time) - new Date(text)) / 1000;
  if (seconds < 1) return "now";
  return `${duration(seconds < 90 ? Math.round(seconds) : seconds < 5400 ? Math.round(seconds / 60) * 60 : seconds)} ago`;
}

// Elements

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function put(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

function badge(target, text, kind) {
  put(target, text);
  target.className = `badge ${kind}`;
}

// Make the children of `parent` those of `items`, by key: what stays keeps its element, and so the focus and the selection.
// `make`: an item's element, and the function that shows an item in it.
const known = new WeakMap();
function keyed(parent, items, keyOf, make) {
  const had = new Map();
  for (const child of parent.children) had.set(known.get(child).key, child);
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let child = had.get(key);
    if (child) had.delete(key);
    else {
      const [made, update] = make(item);
      child = made;
      known.set(child, { key, update });
    }
    known.get(child).update(item);
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
  }
  for (const gone of had.values()) gone.remove();
}

// A problem: its text, and what goes with it.
function makeProblem(one) {
  const made = element("div", `problem ${one.kind}`);
  made.append(element("span", "", one.text));
  if (one.detail) made.append(element("span", "quiet", one.detail));
  if (one.hint) made.append(element("span", "quiet", `Hint: ${one.hint}`));
  return [made, () => {}];
}

function problems(parent, list) {
  parent.hidden = !list.length;
  keyed(parent, list, (one) => JSON.stringify([one.kind, one.text, one.detail, one.hint]), makeProblem);
}

const waits = (wait, who) =>
  wait ? [{ kind: wait.hint ? "warn" : "idle", text: who ? `${who} ${wait.message}` : wait.message, detail: wait.detail, hint: wait.hint }] : [];

// Subscriptions

const FACTS = ["Lag", "Throughput", "Tables", "Rows", "Delta files", "WAL kept", "Position"];

function makeSubscription() {
  const made = element("article", "panel subscription");
  const heading = element("div", "heading");
  const parts = { name: element("h3"), badge: element("span", "badge"), facts: {} };
  heading.append(parts.name, parts.badge);
  const facts = element("dl", "facts");
  for (const name of FACTS) {
    const box = element("div"), value = element("dd"), main = element("span"), small = element("small");
    value.append(main, small);
    box.append(element("dt", "", name), value);
    facts.append(box);
    parts.facts[name] = (text, more = "") => (put(main, text), put(small, more));
  }
  parts.problems = element("div", "problems");
  parts.charts = element("div", "charts");
  parts.quiet = element("p", "quiet nothing");
  parts.lag = new Chart("Lag until visible in Delta", duration, "seconds", false);
  parts.rate = new Chart("Rows a second", compact, "count", true);
  parts.charts.append(parts.lag.element, parts.rate.element);
  made.append(heading, facts, parts.problems, parts.charts, parts.quiet);
  return [made, (one) => updateSubscription(parts, one)];
}

function updateSubscription(made, one) {
  put(made.name, one.name);
  badge(made.badge, one.condition, one.condition_level);
  const unknown = one.lag_unknown_since ? `unknown since ${clock(one.lag_unknown_since)}` : "";
  const lag = one.lag_seconds !== null ? duration(one.lag_seconds) : one.lag_bytes !== null ? size(one.lag_bytes) : "unknown";
  made.facts.Lag(lag, unknown || (one.lag_bytes !== null && one.lag_seconds !== null ? size(one.lag_bytes) : ""));
  const history = one.history;
  const rows = history?.rows_per_second.findLast((value) => value !== null);
  const transactions = history?.transactions_per_second.findLast((value) => value !== null);
  const bytes = history?.bytes_per_second.findLast((value) => value !== null);
  made.facts.Throughput(rows === undefined ? "–" : `${compact(rows)} rows/s`, rows === undefined ? "" : `${compact(transactions)} tx/s, ${size(bytes)}/s`);
  const ready = (one.tables_by_state.r ?? 0) + (one.tables_by_state.s ?? 0);
  made.facts.Tables(count(one.tables_total), ready === one.tables_total ? "all follow" : `${count(ready)} follow`);
  made.facts.Rows(one.rows === null ? "–" : one.rows < 1e6 ? count(one.rows) : short.format(one.rows), `${one.rows_applied < 1e6 ? count(one.rows_applied) : short.format(one.rows_applied)} changes applied`);
  const kept = one.retained_bytes === null ? "" : `${size(one.retained_bytes + (one.log_bytes ?? 0))} old files, logs`;
  made.facts["Delta files"](size(one.live_bytes), kept);
  made.facts["WAL kept"](size(one.retained_wal_bytes), one.safe_wal_bytes === null ? "" : `${size(one.safe_wal_bytes)} until lost`);
  made.facts.Position(one.flush_lsn ?? "–", one.publisher_lsn === null ? "" : `server ${one.publisher_lsn}`);
  const list = [];
  if (one.error) {
    const since = one.error_time ? `${one.error} (${clock(one.error_time)})` : one.error;
    list.push({ kind: "", text: since, detail: one.detail, hint: one.hint });
  }
  for (const warning of one.warnings) list.push({ kind: "warn", text: warning.message, detail: warning.detail, hint: warning.hint });
  list.push(...waits(one.waiting, "The apply worker"));
  problems(made.problems, list);
  const moved = history && (history.lag_seconds.some((value) => value !== null) || history.rows_per_second.some((value) => value));
  made.charts.hidden = !moved;
  made.quiet.hidden = !!moved;
  put(made.quiet, history ? `Nothing has come in the last ${asked.span}.` : "The first sample of lag and throughput comes within seconds.");
  if (moved) {
    made.lag.show(history.lag_seconds, history.step, history.end);
    made.rate.show(history.rows_per_second, history.step, history.end);
  }
}

// Rows of tables

function makeRow(labels, update) {
  const made = element("tr");
  made.setAttribute("role", "row");
  const [first, second, ...cells] = labels.map((label, number) => {
    const cell = element("td", number > 1 ? "number" : "");
    cell.setAttribute("role", "cell");
    cell.dataset.label = label;
    made.append(cell);
    return cell;
  });
  const named = element("div");
  const parts = { name: element("span", "name"), under: element("span", "quiet"), problems: element("div", "problems") };
  named.append(parts.name, " ", parts.under);
  first.append(named, parts.problems);
  parts.problems.hidden = true;
  Object.assign(parts, { badge: element("span", "badge"), beside: element("span", "quiet") });
  second.append(parts.badge, " ", parts.beside);
  parts.cells = cells.map((cell) => {
    const value = element("span");
    cell.append(value);
    return value;
  });
  return [made, (one) => update(parts, one)];
}

const LABELS = ["Table", "State", "Rows", "Size", "Lag", "Last commit"];

function stateOf(one) {
  if (one.stopped) return ["stopped", "bad"];
  if (one.error) return ["failing", "bad"];
  if (one.state === "r" || one.state === "s") return [one.state_words, "good"];
  return [one.state_words, one.state === "i" ? "" : "warn"];
}

function updateTable(made, one) {
  put(made.name, one.name);
  put(made.under, answered.subscriptions_total > 1 ? one.subscription : "");
  badge(made.badge, ...stateOf(one));
  const copied = one.state === "d" && !one.stopped && one.rows_copied !== null;
  put(made.beside, copied ? progress(one) : one.error && !one.stopped ? one.state_words : "");
  const [rows, bytes, lag, commit] = made.cells;
  put(rows, count(copied ? one.rows_copied : one.rows));
  put(bytes, size(one.live_bytes === null ? null : one.live_bytes + (one.retained_bytes ?? 0)));
  bytes.title = one.live_bytes === null ? "" : `${size(one.live_bytes)} in ${count(one.files)} files, ${size(one.retained_bytes)} in old ones, log ${size(one.log_bytes)}`;
  put(lag, one.lag_seconds !== null ? duration(one.lag_seconds) : size(one.lag_bytes));
  put(commit, one.last_commit ? ago(one.last_commit) : one.lsn ?? "–");
  commit.title = [one.last_commit ? clock(one.last_commit) : "", one.lsn ? `holds everything up to ${one.lsn}` : ""].filter(Boolean).join("; ");
  const list = [];
  if (one.error) list.push({ kind: "", text: one.error_lsn ? `At ${one.error_lsn}: ${one.error}` : one.error, hint: one.hint });
  if (!one.error && one.stopped) list.push({ kind: "", text: "The table has stopped.", hint: one.hint });
  if (one.foreign_commit) list.push({ kind: "warn", text: `Written by others: ${one.foreign_commit}` });
  const verified = one.verification;
  if (verified && ["different", "failed"].includes(verified.outcome)) {
    const numbers = `${count(verified.missing)} missing, ${count(verified.extra)} extra, ${count(verified.different)} different`;
    const text = verified.outcome === "failed" ? `Could not be verified: ${verified.reason ?? ""}` : `Differs from the publisher's: ${numbers} (${clock(verified.finished)})`;
    list.push({ kind: verified.outcome === "failed" ? "warn" : "", text, hint: verified.hint ?? "pubsub verify names the rows; --repair copies them anew." });
  }
  if (verified && verified.outcome !== "different" && verified.equal === false)
    list.push({ kind: "", text: `Differed from the publisher's when it was last compared (${clock(verified.differed_at)}).`, hint: "pubsub verify names the rows; --repair copies them anew." });
  list.push(...waits(one.waiting));
  problems(made.problems, list);
}

const share = (one) => (one.rows_estimated ? Math.min(1, one.rows_copied / one.rows_estimated) : null);

function progress(one) {
  const part = share(one);
  return part === null ? "" : `${Math.floor(part * 100)}\u00a0%`;
}

function makeCopy() {
  const made = element("li", "copy");
  const parts = { name: element("span", "name"), text: element("span", "quiet"), bar: element("progress") };
  made.append(parts.name, parts.text, parts.bar);
  return [made, (one) => updateCopy(parts, one)];
}

function updateCopy(made, one) {
  put(made.name, answered.subscriptions_total > 1 ? `${one.name} (${one.subscription})` : one.name);
  const part = share(one);
  const parts = [one.rows_copied === null ? "not begun" : `${count(one.rows_copied)} of ${one.rows_estimated ? `~${count(one.rows_estimated)}` : "unknown"} rows`];
  if (part !== null) parts.push(progress(one));
  if (one.copy_seconds_left !== null) {
    const end = new Date(new Date(answered.time).getTime() + one.copy_seconds_left * 1000);
    parts.push(`about ${duration(one.copy_seconds_left)} left, until ${end.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" })}`);
  }
  put(made.text, parts.join(" · "));
  made.bar.setAttribute("aria-label", `Copy of ${one.name}`);
  if (part === null) made.bar.removeAttribute("value");
  else made.bar.value = part;
}

// Slots, streams, events

const SLOT_LABELS = ["Slot", "State", "Confirmed", "Server at", "WAL kept", "Until lost"];
const STREAM_LABELS = ["Subscriber", "State", "Sent", "Written", "Flushed", "Applied"];
const WHERE = { publisher: "on the publisher", walsender: "served here (walsender)", node: "served here (Delta tables)" };

function updateSlot(made, one) {
  put(made.name, one.slot_name);
  put(made.under, [WHERE[one.server] ?? one.server, one.database, one.subscription !== null && one.subscription !== one.slot_name ? `of ${one.subscription}` : ""].filter(Boolean).join(" · "));
  if (one.unknown_since) badge(made.badge, "unknown", "bad");
  else if (one.wal_status === "lost") badge(made.badge, "lost", "bad");
  else if (one.wal_status === "unreserved") badge(made.badge, "soon lost", "bad");
  else badge(made.badge, one.active ? "in use" : one.active === null ? "unknown" : "not in use", one.active ? "good" : one.active === null ? "" : "warn");
  put(made.beside, one.invalidation_reason ?? (one.wal_status === "extended" ? "extended" : ""));
  const [confirmed, current, kept, safe] = made.cells;
  put(confirmed, one.confirmed_flush_lsn ?? "–");
  put(current, one.current_lsn ?? "–");
  put(kept, size(one.retained_wal_bytes));
  const unlimited = one.safe_wal_bytes === null && one.wal_status !== null && one.wal_status !== "lost" && !one.unknown_since;
  put(safe, unlimited ? "no limit" : size(one.safe_wal_bytes));
}

function updateStream(made, one) {
  put(made.name, one.application_name || "(no name)");
  put(made.under, [one.usename, one.client_addr, one.server].filter(Boolean).join(" · "));
  badge(made.badge, one.state ?? "unknown", one.state === "streaming" ? "good" : "warn");
  ["sent_lsn", "write_lsn", "flush_lsn", "replay_lsn"].forEach((name, number) => put(made.cells[number], one[name] ?? "–"));
}

const LEVELS = { error: "bad", critical: "bad", warning: "warn" };

function makeEvent(one) {
  const made = element("li", "event");
  const time = element("time"), text = element("p"), level = element("span"), mark = element("span");
  badge(mark, one.level, LEVELS[one.level] ?? "");
  level.append(mark);
  const fields = element("dl");
  for (const [name, value] of Object.entries(one.fields)) {
    const field = element("div");
    field.append(element("dt", "", name), element("dd", "", value));
    fields.append(field);
  }
  made.append(time, level, text);
  if (fields.childElementCount) made.append(fields);
  return [
    made,
    (event) => {
      put(time, clock(event.last));
      time.dateTime = event.last;
      put(text, event.times > 1 ? `${event.text} (${count(event.times)} times since ${clock(event.first)})` : event.text);
    },
  ];
}

// The whole

// A pager in `nav`; `go`: shows the page that begins with a number.  Returns the function that shows where one is.
function pager(nav, what, go) {
  const [before, text, after] = [element("button", "", "Previous"), element("span", "quiet"), element("button", "", "Next")];
  let first = 0, many = 0;
  before.type = after.type = "button";
  before.setAttribute("aria-label", `Previous ${what}`);
  after.setAttribute("aria-label", `Next ${what}`);
  before.addEventListener("click", () => go(Math.max(0, first - many)));
  after.addEventListener("click", () => go(first + many));
  nav.append(before, text, after);
  return (offset, limit, total) => {
    [first, many] = [offset, limit];
    nav.hidden = total <= limit;
    put(text, `${count(offset + 1)}–${count(Math.min(total, offset + limit))} of ${count(total)}`);
    before.disabled = offset === 0;
    after.disabled = offset + limit >= total;
  };
}

const pageSubscriptions = pager($("subscription-pages"), "subscriptions", (to) => ask({ subscriptions: to }));
const pageTables = pager($("table-pages"), "tables", (to) => ask({ offset: to }));

function show() {
  const found = answered;
  $("main").hidden = false;
  put($("node"), `node ${found.node}`);
  put($("memory"), found.memory ? memory(found.memory) : "");
  put($("updated"), `${clock(found.time)}`);
  const troubled = Object.keys(found.obstacles).length;
  if (!found.subscriptions_total) badge($("condition"), "no subscriptions", "");
  else if (!troubled) badge($("condition"), found.subscriptions_total === 1 ? "the subscription follows" : `all ${count(found.subscriptions_total)} subscriptions follow`, "good");
  else badge($("condition"), `${count(troubled)} of ${count(found.subscriptions_total)} ${found.subscriptions_total === 1 ? "does" : "do"} not follow`, "bad");
  document.title = troubled ? `(${troubled}) pubsub` : "pubsub";

  keyed($("subscriptions"), found.subscriptions, (one) => one.name, makeSubscription);
  pageSubscriptions(found.subscriptions_offset, found.subscriptions_limit, found.subscriptions_total);

  $("copies-section").hidden = !found.copies_total;
  put($("copies-count"), found.copies_total > found.copies.length ? `${found.copies.length} of ${count(found.copies_total)}` : "");
  keyed($("copies"), found.copies, (one) => JSON.stringify([one.subscription, one.name]), makeCopy);

  const all = found.tables_matching === found.tables_total;
  put($("tables-count"), all ? count(found.tables_total) : `${count(found.tables_matching)} of ${count(found.tables_total)}`);
  for (const option of $("show").options) put(option, `${option.dataset.text ??= option.textContent} (${count(found.tables_shown[option.value])})`);
  keyed($("tables").tBodies[0], found.tables, (one) => JSON.stringify([one.subscription, one.name]), () => makeRow(LABELS, updateTable));
  $("tables").hidden = !found.tables.length;
  $("tables-empty").hidden = !!found.tables.length;
  put($("tables-empty"), found.tables_total ? "No table matches." : "No tables: CREATE SUBSCRIPTION makes them.");
  pageTables(found.tables_offset, found.tables_limit, found.tables_matching);

  keyed($("slots").tBodies[0], found.slots, (one) => JSON.stringify([one.server, one.slot_name, one.subscription]), () => makeRow(SLOT_LABELS, updateSlot));
  put($("slots-count"), found.slots_total > found.slots.length ? `${found.slots.length} of ${count(found.slots_total)}` : "");
  $("slots").hidden = !found.slots.length;
  $("slots-empty").hidden = !!found.slots.length;
  $("streams-section").hidden = !found.streams.length;
  keyed($("streams").tBodies[0], found.streams, (one) => JSON.stringify([one.server, one.pid]), () => makeRow(STREAM_LABELS, updateStream));

  keyed($("events"), found.events, (one) => JSON.stringify([one.level, one.text, one.fields]), makeEvent);
  $("events").hidden = !found.events.length;
  $("events-empty").hidden = !!found.events.length;
}

async function ask(changes = {}) {
  Object.assign(asked, changes);
  clearTimeout(timer);
  asking?.abort();
  const mine = (asking = new AbortController());
  let found = null;
  try {
    const answer = await fetch(`status.json?${new URLSearchParams(asked)}`, { signal: mine.signal, cache: "no-store" });
    if (!answer.ok) throw new Error(`${answer.status} ${(await answer.text()).trim()}`);
    found = await answer.json();
  } catch (error) {
    if (mine.signal.aborted) return;
    const since = answered ? ` What is shown is of ${clock(answered.time)}.` : "";
    put($("failure"), `The daemon does not answer (${error.message}).${since}`);
  }
  $("failure").hidden = found !== null;
  document.body.classList.toggle("stale", found === null);
  if (mine === asking && !paused && !document.hidden) timer = setTimeout(ask, EVERY);
  if (found === null) return;
  answered = found;
  show();
}

let typed = 0;
$("search").addEventListener("input", () => {
  clearTimeout(typed);
  typed = setTimeout(() => ask({ search: $("search").value, offset: 0 }), 200);
});
$("filter").addEventListener("submit", (event) => {
  event.preventDefault();
  clearTimeout(typed);
  ask({ search: $("search").value, offset: 0 });
});
$("show").addEventListener("change", () => ask({ show: $("show").value, offset: 0 }));
$("order").addEventListener("change", () => ask({ order: $("order").value, offset: 0 }));
for (const one of document.getElementsByName("span")) one.addEventListener("change", () => ask({ span: one.value }));
$("pause").addEventListener("click", () => {
  paused = !paused;
  put($("pause"), paused ? "Go on" : "Pause");
  if (paused) clearTimeout(timer);
  else ask();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else if (!paused) ask();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  event.preventDefault();
  $("search").focus();
  $("search").select();
});
// A browser keeps what was chosen over a reload.
asked.search = $("search").value;
asked.show = $("show").value;
asked.order = $("order").value;
asked.span = document.querySelector("input[name=span]:checked").value;
ask();
