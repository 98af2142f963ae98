"use strict";

const at = (id) => document.getElementById(id);
const made = [];
let shown = 0;

function element(tag, properties = {}, ...inside) {
  const one = Object.assign(document.createElement(tag), properties);
  one.append(...inside);
  return one;
}

function numberLines(faulty = new Set()) {
  const count = at("scenario").value.split("\n").length;
  at("lines").replaceChildren(...Array.from({ length: count }, (_, i) =>
    element("div", { textContent: i + 1, className: faulty.has(i + 1) ? "fault" : "" })));
  at("lines").scrollTop = at("scenario").scrollTop;
}

function edit(text) {
  at("scenario").value = text;
  at("faults").replaceChildren();
  numberLines();
}

async function ask(path, options) {
  const answer = await fetch(path, options);
  const type = answer.headers.get("Content-Type") || "";
  const data = type.includes("json") ? await answer.json() : {};
  if (!answer.ok && !data.faults) throw new Error(`the server answered ${answer.status}`);
  return data;
}

function showFaults(faults) {
  at("faults").replaceChildren(...faults.map((fault) => element("li", { textContent: fault.text })));
  numberLines(new Set(faults.map((fault) => fault.line)));
}

function show(entry) {
  shown = entry.number;
  const report = (name) => `/report/${entry.number}/${name}`;
  const links = entry.files.flatMap((name, i) => [i ? ", " : "", element("a", { href: report(name), textContent: name })]);
  at("right").replaceChildren(
    element("h2", { textContent: entry.title }),
    element("pre", { textContent: entry.text }),
    ...entry.pictures.map((name) => element("img", { src: report(name), alt: `${name.replace(".png", "")} of ${entry.title}` })),
    element("p", {}, "Files: ", ...links));
  at("right").scrollIntoView({ block: "nearest" });
  list();
}

function list() {
  const ticked = new Set([...document.querySelectorAll("#history input:checked")].map((box) => Number(box.value)));
  at("history").replaceChildren(...[...made].reverse().map((entry) => {
    const box = element("input", { type: "checkbox", value: entry.number, disabled: !entry.comparable,
      checked: ticked.has(entry.number), ariaLabel: `compare ${entry.title}` });
    const link = element("a", { href: "#", textContent: entry.title, className: entry.number === shown ? "shown" : "" });
    link.addEventListener("click", (event) => { event.preventDefault(); show(entry); });
    return element("li", { value: entry.number }, box, " ", link, `: ${entry.line}`);
  }));
  offerComparison();
}

function offerComparison() {
  at("compare").disabled = document.querySelectorAll("#history input:checked").length !== 2;
}

async function predict() {
  const sets = at("sets").value.split("\n").map((line) => line.trim()).filter(Boolean);
  at("predict").disabled = true;
  at("state").textContent = "predicting …";
  try {
    const answer = await ask("/predict", { method: "POST", headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ text: at("scenario").value, sets }) });
    showFaults(answer.faults || []);
    if (!answer.faults) {
      made.push(sets.length ? { ...answer, title: `${answer.title} (${sets.join(", ")})` } : answer);
      show(made.at(-1));
    }
    at("state").textContent = "";
  } catch (error) {
    at("state").textContent = `failed: ${error.message}`;
  }
  at("predict").disabled = false;
}

async function compare() {
  const [second, first] = [...document.querySelectorAll("#history input:checked")].map((box) => Number(box.value));
  try {
    const answer = await ask(`/compare/${first}/${second}`);
    shown = 0;
    at("right").replaceChildren(element("h2", { textContent: `${first} and ${second}` }),
      element("pre", { textContent: answer.text, className: "wrapped" }),
      element("img", { src: `/report/${answer.number}/${answer.picture}?${Date.now()}`, alt: "the two side by side" }));
    list();
  } catch (error) {
    at("state").textContent = `failed: ${error.message}`;
  }
}

at("scenario").addEventListener("input", () => numberLines());
at("scenario").addEventListener("scroll", () => { at("lines").scrollTop = at("scenario").scrollTop; });
at("history").addEventListener("change", offerComparison);
at("predict").addEventListener("click", predict);
at("compare").addEventListener("click", compare);
at("examples").addEventListener("change", async (event) => {
  if (event.target.value) edit((await ask(`/example/${event.target.value}`)).text);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !at("predict").disabled) predict();
});

ask("/start").then((answer) => {
  at("examples").append(...answer.examples.map((name) => element("option", { value: name, textContent: name })));
  edit(answer.text);
});
