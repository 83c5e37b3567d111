// Runs the page's own script without a browser: a document of plain objects, and what the server would send.
// Reads {script, state} as JSON on stdin, and writes what the page then holds as JSON on stdout.
"use strict";
const vm = require("vm");

class Node {
  constructor(tag) {
    Object.assign(this, { tag, attributes: {}, children: [], style: {}, hidden: false, clientWidth: 600 });
  }

  setAttribute(name, value) { this.attributes[name] = value; }
  getAttribute(name) { return this.attributes[name] ?? null; }
  removeAttribute(name) { delete this.attributes[name]; }
  getBoundingClientRect() { return { left: 0 }; }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  get textContent() { return this.children.map((child) => child.textContent).join(""); }
  set textContent(text) { this.children = [{ textContent: text }]; }
  set innerHTML(_) { throw new Error("text was taken for markup"); }
  all() { return [this, ...this.children.flatMap((child) => (child instanceof Node ? child.all() : []))]; }
}

const input = JSON.parse(require("fs").readFileSync(0, "utf8"));
const named = {};
const document = {
  title: "",
  createElement: (tag) => new Node(tag),
  createElementNS: (_, tag) => new Node(tag),
  createTextNode: (text) => ({ textContent: String(text) }),
  getElementById: (id) => (named[id] ??= new Node(`#${id}`)),
  querySelectorAll: () => Object.values(named).flatMap((node) => node.all()).filter((node) => "data-since" in node.attributes),
};
document.getElementById("state").textContent = JSON.stringify(input.state);
document.getElementById("smoothing").value = "60";

const sources = [];
class EventSource {
  constructor(address) {
    this.address = address;
    sources.push(this);
  }
}

class ResizeObserver {
  observe() {}
}

const context = vm.createContext({ document, EventSource, ResizeObserver, setInterval() {}, location: { protocol: "http:" }, console });
vm.runInContext(input.script, context);
for (const event of input.events ?? []) sources[0].onmessage({ data: JSON.stringify(event) });
const values = (input.values ?? []).map((words) => vm.runInContext(words, context));
const nodes = Object.values(named).flatMap((node) => node.all());
process.stdout.write(JSON.stringify({
  title: document.title,
  source: sources[0]?.address,
  text: Object.fromEntries(Object.entries(named).map(([id, node]) => [id, node.textContent])),
  hidden: Object.fromEntries(Object.entries(named).map(([id, node]) => [id, node.hidden])),
  attributes: nodes.map(({ tag, attributes }) => [tag, attributes]),
  values,
}));
