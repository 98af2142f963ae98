"use strict";

const BEFORE = "*before"; // the choice that holds the text of a server that was started with another one
const MOST_FAULTS = 50;
const MOST_BYTES = 1 << 20;
const ADVISED = /((?:^ +--set .*\n?)+)/m; // lines of a report that say how to make one change
const SETTING = /--set (?:'([^']*)'|(\S+))/g;

const at = (id) => document.getElementById(id);
const made = new Map(); // predictions by number
const shipped = {}; // texts as they were before any edit, by choice
const keep = { chosen: "", texts: {}, sets: "", start: null, instance: "", job: 0 }; // survives a reload
let instance = "";
let job = 0;
let saving = 0;

function element(tag, properties = {}, ...inside) {
  const one = Object.assign(document.createElement(tag), properties);
  one.append(...inside);
  return one;
}

function link(text, act) {
  const one = element("a", { href: "#", textContent: text });
  one.addEventListener("click", (event) => { event.preventDefault(); act(); });
  return one;
}

function save() {
  clearTimeout(saving);
  saving = 0;
  try {
    sessionStorage.setItem("drystep", JSON.stringify(keep));
  } catch { /* full or forbidden: the page works without */ }
}

function saveSoon() {
  saving ||= setTimeout(save, 300);
}

async function ask(path, options) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw Object.assign(new Error("the server does not answer: is drystep ui still running?"), { lost: true });
  }
  if (answer.status === 403) {
    throw new Error("the server was restarted: open the address that it printed, in this tab (the text is kept)");
  }
  const data = await answer.json().catch(() => ({}));
  if (!answer.ok && !data.faults) throw new Error(data.error || `the server answered ${answer.status}`);
  return data;
}

const own = (path) => `/${instance}/${path}`;

// ------------------------------------------------------------------------------------------------------ what is said
function say(text, bad = false) {
  if (at("state").textContent !== text) at("state").textContent = text;
  at("state").className = bad ? "bad" : "";
  at("clock").textContent = "";
}

function fail(error) {
  say(error.message, true);
}

function old(is) {
  at("older").hidden = !is;
  at("right").classList.toggle("old", is);
}

function tell(now) {
  const waits = now.state === "waiting" && now.other;
  const points = (one) => `${one.done} of ${one.total} points`;
  say(waits ? "waiting for another prediction …" : now.state === "drawing" ? "drawing …"
    : now.stopping ? "stopping after this point …" : "predicting …");
  const counted = waits ? now.other : now;
  at("clock").textContent = `${counted.total ? `${points(counted)}, ` : ""}${Math.floor(counted.seconds)} s`;
  const dropped = !waits && !now.total;
  at("stop").textContent = dropped ? "Drop the result" : "Stop";
  at("stop").title = dropped ? "A single run cannot be stopped midway: its result will be dropped, and the page is free."
    : waits ? "" : "What is finished will be shown.";
  at("stop").hidden = now.stopping;
  at("other").hidden = !(waits && now.other.total && !now.other.stopping);
  at("other").value = waits ? now.other.job : "";
}

// -------------------------------------------------------------------------------------------------------- the editor
function numberLines() {
  const count = at("scenario").value.split("\n").length;
  if (Number(at("numbers").dataset.count) !== count) {
    at("numbers").textContent = Array.from({ length: count }, (_, i) => i + 1).join("\n");
    at("numbers").dataset.count = count;
  }
  at("lines").scrollTop = at("scenario").scrollTop;
}

function mark(lines) {
  at("marks").replaceChildren(...lines.map((line) => element("b", { textContent: line, style: `--of: ${line}` })));
}

function edit(text) {
  at("scenario").value = text;
  at("faults").replaceChildren();
  edited();
}

function edited() {
  const text = at("scenario").value;
  if (text === shipped[keep.chosen] && keep.chosen !== BEFORE) delete keep.texts[keep.chosen];
  else keep.texts[keep.chosen] = text;
  at("undo").hidden = text === shipped[keep.chosen];
  mark([]);
  numberLines();
  saveSoon();
}

async function choose(name) {
  if (name && name !== BEFORE) shipped[name] ??= (await ask(`/example/${name}`)).text;
  keep.chosen = at("examples").value = name;
  edit(keep.texts[name] ?? shipped[name]);
}

function goTo(box, line) {
  const area = at(box);
  const lines = area.value.split("\n");
  const start = lines.slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
  area.focus();
  area.setSelectionRange(start, start + (lines[line - 1] || "").length);
  area.scrollTop = (line - 1) * parseFloat(getComputedStyle(area).lineHeight) - area.clientHeight / 2;
  area.scrollLeft = 0;
}

function showFaults(faults) {
  const boxes = { scenario: "scenario", changes: "sets" };
  const items = faults.slice(0, MOST_FAULTS).map((fault) => {
    if (!fault.line) return element("li", { textContent: fault.text });
    return element("li", {}, link(fault.text, () => goTo(boxes[fault.box], fault.line)));
  });
  if (faults.length > MOST_FAULTS) items.push(element("li", { textContent: `and ${faults.length - MOST_FAULTS} more` }));
  at("faults").replaceChildren(...items);
  const inEditor = faults.filter((fault) => fault.box === "scenario").map((fault) => fault.line);
  mark([...new Set(inEditor)].slice(0, MOST_FAULTS));
}

// -------------------------------------------------------------------------------------------- predictions and history
function picture(path, alt) {
  return element("a", { href: path, target: "_blank", rel: "noopener", title: "full size" },
    element("img", { src: path, alt }));
}

function change(settings) {
  const field = (line) => line.split("=")[0].trim();
  const replaced = settings.map(field);
  const others = at("sets").value.split("\n").filter((line) => line.trim() && !replaced.includes(field(line)));
  const lines = [...others, ...settings];
  at("sets").value = keep.sets = lines.join("\n");
  at("sets").rows = Math.max(at("sets").rows, Math.min(lines.length, 8));
  saveSoon();
  at("predict").focus();
  say("put among the changes: Predict tries it");
}

function withAdvice(text) {
  return text.split(ADVISED).flatMap((piece, i) => {
    if (i % 2 === 0) return piece;
    const settings = [...piece.matchAll(SETTING)].map((found) => found[1] ?? found[2]);
    const chosen = link(piece.trim(), () => change(settings));
    chosen.title = "put among the changes on top";
    return ["    ", chosen, "\n"];
  });
}

function put(number, ...inside) {
  old(false);
  at("report").replaceChildren(...inside);
  for (const item of at("history").children) item.classList.toggle("shown", item.value === number);
}

function show(entry) {
  const report = (name) => own(`report/${entry.number}/${name}`);
  const files = entry.files.flatMap((name, i) => [i ? ", " : "", element("a", { href: report(name), textContent: name })]);
  put(entry.number, element("h2", { textContent: `${entry.number}: ${entry.title}` }),
    element("pre", {}, ...withAdvice(entry.text)),
    ...entry.pictures.map((name) => picture(report(name), `${name.replace(".png", "")} of ${entry.title}`)),
    element("p", {}, "Files: ", ...files));
}

function add(entry) {
  if (made.has(entry.number)) return;
  made.set(entry.number, entry);
  const box = element("input", { type: "checkbox", value: entry.number, disabled: !entry.comparable,
    ariaLabel: `compare ${entry.number}: ${entry.title}` });
  const title = link(entry.title, () => { show(entry); at("right").scrollIntoView(); });
  const item = element("li", { value: entry.number }, box, " ", title, `: ${entry.line}`);
  at("history").insertBefore(item, [...at("history").children].find((one) => one.value < entry.number) || null);
}

function offerComparison() {
  at("compare").disabled = document.querySelectorAll("#history input:checked").length !== 2;
}

function busy(number) {
  job = keep.job = number;
  keep.instance = instance;
  save();
  at("predict").setAttribute("aria-disabled", String(Boolean(number)));
  if (number) return;
  if (document.activeElement === at("stop") || document.activeElement === at("other")) at("predict").focus();
  at("stop").hidden = at("other").hidden = true;
}

async function predict() {
  if (job || !instance) return;
  const text = at("scenario").value;
  const sets = at("sets").value.trim() ? at("sets").value.split("\n") : [];
  busy(-1);
  say("predicting …");
  try {
    if (new Blob([text, ...sets]).size > MOST_BYTES) throw new Error("the text is larger than 1 MiB");
    const asked = await ask(own("predict"), { method: "POST", headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ text, sets }) });
    await follow(asked.job);
  } catch (error) {
    at("faults").replaceChildren();
    failed(error);
  }
}

function failed(error) {
  const number = job;
  busy(0);
  if (error.lost) keep.job = number; // as when the page is reloaded meanwhile: it goes on there
  save();
  old(made.size > 0);
  fail(error);
}

async function follow(number) {
  busy(number);
  let answer = {};
  do {
    answer = await ask(own(`job/${number}`)).catch((error) => { if (job === number) throw error; return {}; });
    if (job !== number) return;
    if (answer.state) tell(answer);
  } while (answer.state);
  busy(0);
  showFaults(answer.faults || []);
  if (answer.entry) {
    add(answer.entry);
    show(answer.entry);
    at("right").scrollIntoView();
    say(`predicted: ${answer.entry.line}`);
  } else if (answer.faults) {
    old(made.size > 0);
    say(answer.faults.length === 1 ? "a fault:" : `${answer.faults.length} faults:`, true);
  } else {
    say("dropped");
  }
}

async function stop() {
  const number = job;
  try {
    const now = await ask(own(`stop/${number}`), { method: "POST" });
    if (job !== number || now.ended) return;
    const waiting = now.state === "waiting";
    if (waiting || (now.state === "running" && !now.total)) {
      busy(0);
      say(waiting ? "stopped before it began" : "the result of that prediction will be dropped");
    }
  } catch (error) {
    fail(error);
  }
}

async function compare() {
  const [second, first] = [...document.querySelectorAll("#history input:checked")].map((box) => Number(box.value));
  at("compare").disabled = true;
  say("comparing …");
  try {
    const answer = await ask(own(`compare/${first}/${second}`));
    put(0, element("h2", { textContent: answer.title }),
      element("pre", { textContent: answer.text, className: "wrapped" }),
      picture(own(`report/${answer.picture}`), `${answer.title}: where the step goes`));
    at("right").scrollIntoView();
    say("compared");
  } catch (error) {
    fail(error);
  }
  offerComparison();
}

// ------------------------------------------------------------------------------------------------------------- start
async function begin() {
  if (location.search) history.replaceState(null, "", "/"); // the cookie has the token now
  try {
    Object.assign(keep, JSON.parse(sessionStorage.getItem("drystep") || "{}"));
  } catch { /* not ours, or forbidden */ }
  const start = await ask("/start");
  instance = start.instance;
  shipped[""] = start.text;
  if (keep.start !== null && keep.start !== start.text && "" in keep.texts) {
    keep.texts[BEFORE] = keep.texts[""];
    delete keep.texts[""];
    keep.chosen = "";
  }
  keep.start = start.text;
  at("examples").append(...start.examples.map((name) => element("option", { value: name, textContent: name })));
  if (BEFORE in keep.texts) {
    shipped[BEFORE] = keep.texts[BEFORE];
    at("examples").append(element("option", { value: BEFORE, textContent: "the text of before" }));
  }
  at("sets").value = keep.sets;
  await choose(keep.chosen).catch(() => choose(""));
  start.entries.forEach(add);
  if (start.entries.length) show(start.entries.at(-1));
  if (keep.job > 0 && keep.instance === instance) follow(keep.job).catch(failed);
  else busy(0);
}

at("scenario").addEventListener("input", edited);
at("scenario").addEventListener("scroll", () => { at("lines").scrollTop = at("scenario").scrollTop; });
at("sets").addEventListener("input", () => { keep.sets = at("sets").value; saveSoon(); });
at("history").addEventListener("change", offerComparison);
at("predict").addEventListener("click", predict);
at("stop").addEventListener("click", stop);
at("other").addEventListener("click", () => ask(own(`stop/${at("other").value}`), { method: "POST" }).catch(fail));
at("compare").addEventListener("click", compare);
at("undo").addEventListener("click", () => { edit(shipped[keep.chosen]); at("scenario").focus(); });
at("examples").addEventListener("change", (event) => choose(event.target.value).then(() => say(""), (error) => {
  at("examples").value = keep.chosen;
  fail(error);
}));
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) predict();
});
addEventListener("pagehide", save);
begin().catch(fail);
