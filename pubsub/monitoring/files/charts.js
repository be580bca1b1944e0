// A chart of one quantity over time: an area and a line, with gaps where nothing is known.  Drawn in SVG, and read by pointer or
// arrow keys.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 132, LEFT = 52, RIGHT = 6, TOP = 8, BOTTOM = 20;

function make(name, attributes, parent) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent?.append(element);
  return element;
}

// The least of 1, 2, 5 times a power of ten (of seconds: a handy time, too) that is not below `value`.
function roundedUp(value, steps) {
  if (!(value > 0)) return 1;
  for (const step of steps) if (step >= value) return step;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= value * 0.999999);
}

const SECONDS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400];

export class Chart {
  // `format`: a value as text; `kind`: "seconds" or "count".
  constructor(title, format, kind, second) {
    this.title = title;
    this.format = format;
    this.steps = kind === "seconds" ? SECONDS : [1];
    this.element = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const heading = document.createElement("span");
    heading.textContent = title;
    this.output = document.createElement("output");
    caption.append(heading, this.output);
    this.svg = make("svg", { class: second ? "chart second" : "chart", role: "img", tabindex: "0", focusable: "true" });
    this.element.append(caption, this.svg);
    this.values = [];
    this.at = null;
    this.svg.addEventListener("pointermove", (event) => this.point(this.near(event)));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("blur", () => this.point(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  show(values, step, end) {
    Object.assign(this, { values, step, end });
    this.draw();
  }

  key(event) {
    const last = this.values.length - 1;
    const from = this.at ?? last + 1;
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last, PageUp: from - 20, PageDown: from + 20 }[event.key];
    if (event.key === "Escape") this.point(null);
    if (to === undefined) return;
    event.preventDefault();
    this.point(Math.max(0, Math.min(last, to)));
  }

  near(event) {
    const box = this.svg.getBoundingClientRect();
    const at = Math.round(((event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT)) * (this.values.length - 1));
    return Math.max(0, Math.min(this.values.length - 1, at));
  }

  point(at) {
    this.at = at;
    this.mark();
  }

  time(at, seconds) {
    const time = new Date((this.end - (this.values.length - 1 - at) * this.step - this.step) * 1000);
    return time.toLocaleTimeString("en-GB", seconds ? {} : { hour: "2-digit", minute: "2-digit" });
  }

  x(at) {
    return LEFT + (at / Math.max(1, this.values.length - 1)) * (this.width - LEFT - RIGHT);
  }

  y(value) {
    return HEIGHT - BOTTOM - (value / this.most) * (HEIGHT - TOP - BOTTOM);
  }

  draw() {
    this.width = this.svg.clientWidth;
    if (!this.width || !this.values.length) return;
    const known = this.values.filter((value) => value !== null);
    this.most = roundedUp(Math.max(0, ...known), this.steps);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.replaceChildren();
    for (const part of [0, 0.5, 1]) {
      const y = Math.round(this.y(this.most * part)) + 0.5;
      make("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }, this.svg);
      if (part === 0.5) continue;
      make("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, this.svg).textContent = this.format(this.most * part);
    }
    const labels = this.width < 420 ? 3 : 5;
    for (let number = 0; number < labels; number++) {
      const at = Math.round((number / (labels - 1)) * (this.values.length - 1));
      const anchor = number === 0 ? "start" : number === labels - 1 ? "end" : "middle";
      make("text", { x: this.x(at), y: HEIGHT - 4, "text-anchor": anchor }, this.svg).textContent = this.time(at, false);
    }
    for (const [from, to] of this.runs()) {
      const points = [];
      for (let at = from; at <= to; at++) points.push(`${this.x(at).toFixed(1)} ${this.y(this.values[at]).toFixed(1)}`);
      if (from === to) points.push(`${(this.x(from) + 1.5).toFixed(1)} ${this.y(this.values[from]).toFixed(1)}`);
      const line = "M" + points.join("L");
      const floor = this.y(0).toFixed(1);
      make("path", { class: "area", d: `${line}V${floor}H${this.x(from).toFixed(1)}Z` }, this.svg);
      make("path", { class: "line", d: line }, this.svg);
    }
    this.overlay = make("g", {}, this.svg);
    const last = known.length ? this.format(known.at(-1)) : "not known";
    const peak = known.length ? `, at most ${this.format(Math.max(...known))}` : "";
    this.summary = known.length ? `last ${last}${peak}` : "nothing known yet";
    this.svg.setAttribute("aria-label", `${this.title}, ${this.time(0, false)} to ${this.time(this.values.length - 1, false)}: ${this.summary}. Arrow keys read single points.`);
    if (this.at !== null && this.at >= this.values.length) this.at = null;
    this.mark();
  }

  // The stretches of known values, as first and last place.
  runs() {
    const found = [];
    this.values.forEach((value, at) => {
      if (value === null) return;
      if (found.length && found.at(-1)[1] === at - 1) found.at(-1)[1] = at;
      else found.push([at, at]);
    });
    return found;
  }

  mark() {
    if (!this.overlay) return;
    this.overlay.replaceChildren();
    if (this.at === null) {
      this.output.textContent = this.summary;
      return;
    }
    const value = this.values[this.at];
    this.output.textContent = `${this.time(this.at, true)}  ${value === null ? "not known" : this.format(value)}`;
    const x = this.x(this.at);
    make("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }, this.overlay);
    if (value !== null) make("circle", { class: "dot", cx: x, cy: this.y(value), r: 3.5 }, this.overlay);
  }
}
