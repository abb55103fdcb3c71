"use strict";
// One program with times, or two: before and after the passes. Folded by module; dagre places what is visible.

const SVG = "http://www.w3.org/2000/svg";
const AT_FIRST = 30; // values and modules that are shown unfolded as the page opens
const MOST = 400; // that are shown at once: a layout of more takes seconds
const IN_A_MODULE = 60; // values directly in a module; more of them are folded into groups
const LONGEST = 34; // characters of a label
const CHARACTER = 7.2, PADDING = 20, HEIGHT = 40, TITLE = 12; // pixels
const LEGIBLE = 0.8; // scale
const COLOURS = 8;

function element(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function milliseconds(ms) {
  return `${ms.toLocaleString("en", { maximumSignificantDigits: 3 })} ms`;
}

function shortened(text) {
  if (text.length <= LONGEST) return text;
  return text.slice(0, LONGEST / 2 - 1) + "\u2026" + text.slice(-LONGEST / 2);
}

// A module: the modules and values in it. One that holds a single thing is left out.
class Module {
  constructor(path, parent) {
    Object.assign(this, { path, parent, modules: new Map(), values: [], size: 0, ms: 0, open: false });
  }

  get children() {
    return [...this.modules.values(), ...this.values];
  }

  // The ids of values must not be those of modules, whatever either is called.
  get id() {
    return `module ${this.path}`;
  }

  // With everything in it, so that nothing is found open when it is opened again.
  fold() {
    this.open = false;
    for (const module of this.modules.values()) module.fold();
  }
}

function treeOf(values) {
  const root = new Module("", null);
  for (const value of values) {
    let place = root;
    for (const part of value.module ? value.module.split(".") : []) {
      const path = place.path ? `${place.path}.${part}` : part;
      if (!place.modules.has(part)) place.modules.set(part, new Module(path, place));
      place = place.modules.get(part);
    }
    place.values.push(value);
  }
  settle(root);
  root.open = true;
  return root;
}

// Where a module holds very many things of a kind, they are put into modules of their own, and these into others.
function grouped(place, things, put, keep) {
  if (things.length <= IN_A_MODULE) return keep(things);
  const size = Math.max(IN_A_MODULE, Math.ceil(things.length / IN_A_MODULE));
  const kind = things[0] instanceof Module ? "modules" : "values";
  const groups = [];
  for (let start = 0; start < things.length; start += size) {
    const part = things.slice(start, start + size);
    const path = `${place.path} ${kind} ${start + 1}\u2013${start + part.length}`.trim();
    const group = new Module(path, place);
    put(group, part);
    settle(group);
    groups.push(group);
  }
  for (const group of groups) place.modules.set(group.path, group);
}

function settle(place) {
  for (const [part, module] of place.modules) {
    settle(module);
    if (module.children.length === 1) {
      place.modules.delete(part);
      const [only] = module.children;
      if (only instanceof Module) place.modules.set(only.path, only);
      else place.values.push(only);
    }
  }
  grouped(place, place.values.splice(0), (group, part) => group.values.push(...part),
    (values) => place.values.push(...values));
  const modules = [...place.modules.values()];
  place.modules.clear();
  grouped(place, modules, (group, part) => part.forEach((module) => group.modules.set(module.path, module)),
    (kept) => kept.forEach((module) => place.modules.set(module.path, module)));
  for (const child of place.children) child.parent = place;
  place.size = place.values.length + [...place.modules.values()].reduce((sum, module) => sum + module.size, 0);
  place.ms = place.children.reduce((sum, child) => sum + child.ms, 0);
}

class View {
  constructor(figure, values, colours, call, hot) {
    this.values = values;
    this.colours = colours; // of rules
    this.call = call; // milliseconds of a whole one; 0 where no time is known
    this.hot = hot; // shares of a call
    this.root = treeOf(values);
    this.scale = 1;
    this.selected = null;
    this.matches = new Set();
    this.stage = figure.querySelector(".stage");
    this.details = figure.querySelector(".details");
    const act = {
      larger: () => this.zoom(1.25),
      smaller: () => this.zoom(0.8),
      fit: () => this.fit(),
      fold: () => this.foldAll(),
      unfold: () => this.unfold(MOST),
    };
    for (const button of figure.querySelectorAll("button")) button.addEventListener("click", act[button.dataset.act]);
    this.stage.addEventListener("wheel", (event) => {
      if (!event.ctrlKey || !event.deltaY) return;
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? 1.1 : 0.9);
    }, { passive: false });
    this.stage.addEventListener("keydown", (event) => this.move(event));
    this.unfold(AT_FIRST);
  }

  visible() {
    const found = [];
    const walk = (place) => {
      for (const child of place.children) {
        found.push(child);
        if (child instanceof Module && child.open) walk(child);
      }
    };
    walk(this.root);
    return found;
  }

  // Modules are opened level by level while no more than so many things are shown.
  unfold(most) {
    let count = this.visible().length;
    const queue = [this.root];
    while (queue.length) {
      for (const module of queue.shift().modules.values()) {
        if (!module.open && count + module.children.length > most) continue;
        if (!module.open) count += module.children.length;
        module.open = true;
        queue.push(module);
      }
    }
    this.draw();
  }

  foldAll() {
    for (const module of this.root.modules.values()) module.fold();
    this.draw();
  }

  // The module or value that stands for a value: the outermost module that is folded.
  shown(value) {
    let found = value;
    for (let place = value.parent; place; place = place.parent) if (!place.open) found = place;
    return found;
  }

  draw() {
    const graph = new dagre.graphlib.Graph({ compound: true });
    graph.setGraph({ nodesep: 18, ranksep: 36, marginx: 12, marginy: 12 });
    graph.setDefaultEdgeLabel(() => ({ labelpos: "c" }));
    const things = new Map(this.visible().map((thing) => [thing.id, thing]));
    for (const thing of things.values()) {
      if (thing instanceof Module && thing.open) graph.setNode(thing.id, {});
      else {
        const lines = this.lines(thing);
        const width = Math.max(...lines.map((line) => line.length)) * CHARACTER + PADDING;
        graph.setNode(thing.id, { width, height: HEIGHT });
      }
      if (thing.parent !== this.root) graph.setParent(thing.id, thing.parent.id);
    }
    for (const value of this.values) {
      const end = this.shown(value);
      for (const number of value.reads) {
        const start = this.shown(this.values[number]);
        if (start !== end) graph.setEdge(start.id, end.id);
      }
    }
    dagre.layout(graph);
    const { width, height } = graph.graph();
    [this.width, this.height] = [width, height];
    const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "values and modules" });
    const placed = graph.nodes().map((id) => [things.get(id), graph.node(id)]);
    for (const [thing, place] of placed) if (thing instanceof Module && thing.open) svg.append(this.frame(thing, place));
    for (const edge of graph.edges()) svg.append(this.arrow(graph.edge(edge).points));
    for (const [thing, place] of placed) if (!(thing instanceof Module && thing.open)) svg.append(this.box(thing, place));
    this.svg = svg;
    this.stage.replaceChildren(svg);
    this.mark();
    this.resize();
  }

  lines(thing) {
    if (thing instanceof Module) return [shortened(thing.path), this.timed(`${thing.size} values`, thing)];
    return [shortened(thing.name), this.timed(shortened([thing.op, thing.type].filter(Boolean).join(" ")), thing)];
  }

  timed(text, thing) {
    return thing.ms ? `${text}, ${milliseconds(thing.ms)}` : text;
  }

  // From 4, for the largest shares of a call, to 0.
  heat(thing) {
    const level = this.call ? this.hot.findIndex((share) => thing.ms >= share * this.call) : -1;
    return level < 0 ? 0 : this.hot.length - level;
  }

  button(thing, label, ...children) {
    const made = element("g", { tabindex: -1, role: "button", "aria-label": label, class: "thing" }, ...children);
    made.addEventListener("click", () => this.press(thing));
    made.thing = thing;
    return made;
  }

  box(thing, { x, y, width, height }) {
    const [name, kind] = this.lines(thing);
    const texts = [
      element("text", { x, y: y - 3, class: "name" }, name),
      element("text", { x, y: y + 13, class: "kind" }, kind),
    ];
    const box = element("rect", { x: x - width / 2, y: y - height / 2, width, height, rx: 5 });
    if (thing instanceof Module) {
      const made = this.button(thing, `unfold ${thing.path}, ${kind}`, box, ...texts);
      made.classList.add("module");
      if (this.heat(thing)) made.classList.add(`heat-${this.heat(thing)}`);
      made.setAttribute("aria-expanded", "false");
      return made;
    }
    const told = { made: `, made by ${thing.rule}`, gone: ", gone after the passes" }[thing.state] ?? "";
    const made = this.button(thing, `${thing.name}, ${kind}${told}`, box, ...texts);
    made.classList.add(thing.state);
    if (this.heat(thing)) made.classList.add(`heat-${this.heat(thing)}`);
    if (this.colours.has(thing.rule)) made.dataset.colour = this.colours.get(thing.rule);
    return made;
  }

  frame(module, { x, y, width, height }) {
    const [left, top] = [x - width / 2, y - height / 2];
    const box = element("rect", { x: left, y: top, width, height, rx: 8 });
    const fits = Math.max(1, Math.floor((width - 16) / CHARACTER));
    const shown = module.path.length > fits ? `\u2026${module.path.slice(1 - fits)}` : module.path;
    const title = element("text", { x: left + 8, y: top + TITLE, class: "title" }, shown);
    const made = this.button(module, `fold ${module.path}`, box, title);
    made.classList.add("frame");
    made.setAttribute("aria-expanded", "true");
    return made;
  }

  arrow(points) {
    const path = points.map(({ x, y }, number) => `${number ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    const [before, end] = points.slice(-2);
    const turn = (Math.atan2(end.y - before.y, end.x - before.x) * 180) / Math.PI;
    const place = `translate(${end.x} ${end.y}) rotate(${turn})`;
    return element("g", { class: "edge", "aria-hidden": "true" },
      element("path", { d: path }), element("path", { d: "M-7 -3.5L0 0L-7 3.5z", transform: place, class: "head" }));
  }

  press(thing) {
    if (!(thing instanceof Module)) return this.select(thing);
    if (thing.open) thing.fold();
    else if (!this.open(thing)) return this.tell(`Fold something first: no more than ${MOST} things are shown at once.`);
    this.draw();
    this.focus(thing);
  }

  open(module) {
    if (!module.open && this.visible().length + module.children.length > MOST) return false;
    module.open = true;
    return true;
  }

  tell(text) {
    const told = document.createElement("p");
    told.textContent = text;
    this.details.replaceChildren(told);
  }

  buttons() {
    return [...this.svg.querySelectorAll(".thing")];
  }

  // One stop for the Tab key; arrows go from one to the next, in the order of the program.
  focus(thing) {
    for (const made of this.buttons()) {
      made.setAttribute("tabindex", made.thing === thing ? 0 : -1);
      if (made.thing === thing) made.focus({ preventScroll: false });
    }
  }

  move(event) {
    const focused = document.activeElement?.thing;
    if (!focused) return;
    if (event.key === "Enter" || event.key === " ") this.press(focused);
    else {
      const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const things = this.visible();
      this.focus(things[Math.min(things.length - 1, Math.max(0, things.indexOf(focused) + step))]);
    }
    event.preventDefault();
  }

  // What is selected and what was looked for; a folded module is marked for what is in it.
  mark() {
    const marked = new Set([...this.matches].map((value) => this.shown(value)));
    this.buttons().forEach((made, number) => {
      made.classList.toggle("match", marked.has(made.thing));
      made.classList.toggle("selected", made.thing === this.selected);
      if (!(made.thing instanceof Module)) made.setAttribute("aria-pressed", made.thing === this.selected);
      made.setAttribute("tabindex", number ? -1 : 0);
    });
  }

  select(value) {
    this.selected = value;
    this.mark();
    this.focus(value);
    const rows = [
      ["op", value.op], ["type", value.type],
      ["time", value.ms ? `${milliseconds(value.ms)}, ${((100 * value.ms) / this.call).toFixed(1)} % of the call` : ""],
      ["module", value.module], ["made by", value.rule],
      ["stands for", value.origins.join("\n")], ["weights", value.weights.join(", ")],
      ["reads", value.reads.map((number) => this.values[number].name).join(", ")],
    ];
    const list = document.createElement("dl");
    for (const [term, text] of rows) {
      if (!text) continue;
      const key = document.createElement("dt"), told = document.createElement("dd");
      key.textContent = term;
      told.textContent = text;
      list.append(key, told);
    }
    const title = document.createElement("h4");
    title.textContent = value.name;
    this.details.replaceChildren(title, list);
  }

  search(text) {
    const wanted = text.trim().toLowerCase();
    this.matches = new Set(wanted ? this.values.filter((value) => value.text.includes(wanted)) : []);
    let opened = false;
    for (const value of this.matches) {
      const path = [];
      for (let place = value.parent; place; place = place.parent) if (!place.open) path.unshift(place);
      if (!path.every((place) => this.open(place) && (opened = true))) break;
    }
    if (opened) this.draw();
    else this.mark();
    const first = this.buttons().find((made) => made.classList.contains("match") && !made.classList.contains("frame"));
    if (first) this.show(first);
    return this.matches.size;
  }

  // Scrolls the stage, and not the page.
  show(made) {
    const [inner, outer] = [made.getBoundingClientRect(), this.stage.getBoundingClientRect()];
    this.stage.scrollLeft += inner.left + inner.width / 2 - (outer.left + outer.width / 2);
    this.stage.scrollTop += inner.top + inner.height / 2 - (outer.top + outer.height / 2);
  }

  // The middle of what is seen stays in the middle.
  zoom(times) {
    const { stage } = this;
    const middle = [
      (stage.scrollLeft + stage.clientWidth / 2) / this.scale, (stage.scrollTop + stage.clientHeight / 2) / this.scale,
    ];
    this.scale = Math.min(4, Math.max(0.05, this.scale * times));
    this.resize();
    stage.scrollLeft = middle[0] * this.scale - stage.clientWidth / 2;
    stage.scrollTop = middle[1] * this.scale - stage.clientHeight / 2;
  }

  fit() {
    const { clientWidth, clientHeight } = this.stage;
    this.scale = Math.min(1, Math.max(0.05, Math.min(clientWidth / this.width, clientHeight / this.height)));
    this.resize();
  }

  // As wide as the stage, but to be read; the rest is a matter of scrolling.
  begin() {
    this.scale = Math.min(1, Math.max(LEGIBLE, this.stage.clientWidth / this.width));
    this.resize();
    this.stage.scrollLeft = (this.width * this.scale - this.stage.clientWidth) / 2;
  }

  resize() {
    this.svg.setAttribute("width", this.width * this.scale);
    this.svg.setAttribute("height", this.height * this.scale);
  }
}

// Of the most frequent rules each has a colour of its own.
function coloursOf(drawings) {
  const counts = new Map();
  for (const { rule } of drawings.flat()) if (rule) counts.set(rule, (counts.get(rule) ?? 0) + 1);
  const rules = [...counts].sort((a, b) => b[1] - a[1] || a[0].localeCompare(b[0]));
  return new Map(rules.map(([rule], number) => [rule, (number % COLOURS) + 1]));
}

function showRules(colours) {
  const legend = document.querySelector(".legend");
  for (const [rule, colour] of colours) {
    const made = document.createElement("li");
    made.textContent = `made by ${rule}`;
    made.classList.add("made");
    made.dataset.colour = colour;
    legend.append(made);
  }
}

const { call, hot, drawings: given } = JSON.parse(document.getElementById("graphs").textContent);
const drawings = given.map((drawing) =>
  drawing.map(([name, op, type, module, origins, rule, weights, reads, state, ms], number) => ({
    id: `value ${number}`, name, op, type, module, origins, rule, weights, reads, state, ms,
    text: [name, op, type, module, rule, ...origins, ...weights].join("\n").toLowerCase(),
  })));
const colours = call ? new Map() : coloursOf(drawings); // where times are known, colours are for them
showRules(colours);
document.getElementById("graph").hidden = false; // what is hidden has no size
const views = [...document.querySelectorAll("figure.graph")].map(
  (figure, number) => new View(figure, drawings[number], colours, call, hot));
for (const view of views) view.begin();
const search = document.getElementById("find"), count = document.getElementById("found");
let typing = 0;
search.addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => {
    const found = views.map((view) => view.search(search.value));
    const told = found.length > 1 ? `${found[0]} before the passes, ${found[1]} after them` : `${found[0]} found`;
    count.textContent = search.value.trim() ? told : "";
  }, 150);
});
