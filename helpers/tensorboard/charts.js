// Draws the charts and tables of the profiler tab, in the place of Google's chart loader: without internet.
//
// The page asks for six kinds of chart and one of table through `google.visualization`; here they are as SVG and
// HTML, with no more of that interface than the page uses. All text is set as text, never as HTML: names in a trace
// may be anyone's. Ink and paper are those of the page, light or dark.
(() => {
  "use strict";

  // A category has the colour that it has in the notebooks' figures (Okabe and Ito's palette).
  const CATEGORIES = {
    Kernel: "#009E73", Memcpy: "#F0E442", Memset: "#CC79A7", Communication: "currentColor", Runtime: "#56B4E9",
    DataLoader: "#D55E00", "CPU Exec": "#0072B2", Other: "#BBBBBB",
  };
  // Okabe and Ito's again, and two of Tol's: a pie has ten slices.
  const PALETTE = [
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8C9BA5", "#AA4499", "#999933",
  ];
  const FONT = "Roboto, Helvetica, Arial, sans-serif";
  const CHARACTER = 6.5; // pixels: about the width of one at 12 pixels

  const value = (cell) => (cell !== null && typeof cell === "object" && "v" in cell ? cell.v : cell);
  const number = (cell) => value(cell) || 0;
  const format = (amount) => amount.toLocaleString("en", { maximumFractionDigits: 2 });
  const shown = (cell) => {
    if (cell !== null && typeof cell === "object" && "f" in cell) return cell.f;
    return typeof cell === "number" ? format(cell) : String(cell ?? "");
  };
  const short = (text, room) => (text.length > room ? `${text.slice(0, Math.max(room - 1, 1))}…` : text);
  // The plugin's own markup goes, and all but two decimals; what else looks like markup is part of a name.
  const plain = (text) =>
    String(text ?? "").replace(/<br>/g, "\n").replace(/<\/?b>|<\/?div( [^<>]*)?>/g, "").replace(/(\.\d\d)\d+/g, "$1");

  class DataTable {
    constructor() { this.columns = []; this.rows = []; this.properties = new Map(); }
    addColumn(column, label) {
      this.columns.push(typeof column === "object" ? { ...column } : { type: column, label });
    }
    addRow(row) { this.rows.push(row); }
    addRows(rows) { rows.forEach((row) => this.addRow(row)); }
    setProperty(row, column, name, property) { this.properties.set(`${row},${column},${name}`, property); }

    // The columns that hold values, each with the tooltip that follows it, if one does.
    get series() {
      const series = [];
      this.columns.forEach((column, index) => {
        if (column.role === "tooltip" && series.length) series.at(-1).tooltip = index;
        else if (index > 0 && !column.role) series.push({ index, name: column.label ?? "" });
      });
      return series;
    }
  }

  function arrayToDataTable([header, ...rows]) {
    const table = new DataTable();
    header.forEach((label, index) => table.addColumn(index ? "number" : "string", label));
    table.addRows(rows);
    return table;
  }

  function svg(parent, name, attributes, text) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, each] of Object.entries(attributes)) element.setAttribute(key, each);
    if (text !== undefined) element.textContent = text;
    parent.appendChild(element);
    return element;
  }

  function html(parent, name, style, text) {
    const element = document.createElement(name);
    Object.assign(element.style, style);
    if (text !== undefined) element.textContent = text;
    parent.appendChild(element);
    return element;
  }

  function label(parent, x, y, text, attributes = {}) {
    const look = { "font-family": FONT, "font-size": 12, fill: "currentColor" };
    return svg(parent, "text", { x, y, ...look, ...attributes }, text);
  }

  // Black or white, whichever is easier to read on `colour` (relative luminance, WCAG 2).
  function inkOn(colour) {
    const channels = [1, 3, 5].map((start) => parseInt(colour.slice(start, start + 2), 16) / 255);
    const [r, g, b] = channels.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "black" : "white";
  }

  function ticks(least, largest) {
    const rough = (largest - least) / 5 || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough);
    const [from, to] = [Math.floor(least / step + 1e-9), Math.ceil(largest / step - 1e-9)];
    return Array.from({ length: to - from + 1 }, (_, index) => (from + index) * step);
  }

  const tip = {
    show(event, text) {
      this.box ??= html(document.body, "div", {
        position: "fixed", zIndex: 2000, pointerEvents: "none", padding: "6px 10px", borderRadius: "4px",
        background: "#424242", color: "#FFFFFF", font: `13px ${FONT}`, whiteSpace: "pre-line", maxWidth: "480px",
        overflowWrap: "anywhere",
      });
      this.box.textContent = text;
      this.box.hidden = false;
      const { offsetWidth, offsetHeight } = this.box;
      this.box.style.left = `${Math.max(Math.min(event.clientX + 14, innerWidth - offsetWidth - 4), 0)}px`;
      this.box.style.top = `${Math.max(Math.min(event.clientY + 14, innerHeight - offsetHeight - 4), 0)}px`;
    },
    hide() { if (this.box) this.box.hidden = true; },
  };

  class Chart {
    constructor(place) { this.place = place; this.listeners = {}; this.selection = []; }
    on(event, listener) { (this.listeners[event] ??= []).push(listener); }
    fire(event) { (this.listeners[event] ?? []).forEach((listener) => listener()); }
    clearChart() { this.place.replaceChildren(); tip.hide(); }
    getSelection() { return this.selection; }
    setSelection(selection) { this.selection = selection ?? []; this.mark(); }
    mark() {}

    draw(table, options = {}) {
      this.table = table;
      this.options = options;
      this.redraw();
      this.place.chart = this; // the page may draw another in the same place
      const observer = new ResizeObserver(() => {
        if (this.place.chart !== this) observer.disconnect();
        else if (this.place.clientWidth && this.place.clientWidth !== this.width) this.redraw();
      });
      observer.observe(this.place);
      this.fire("ready");
    }

    redraw() {
      this.clearChart();
      this.width = this.place.clientWidth || 600;
      this.height = parseFloat(this.options.height) || this.place.clientHeight || 300;
      this.canvas = svg(this.place, "svg", {
        width: this.width, height: this.height, role: "img", "aria-label": this.options.title || "chart",
        style: "display: block",
      });
      if (this.options.title) label(this.canvas, 8, 16, this.options.title, { "font-weight": "bold", "font-size": 14 });
      this.paint();
    }

    colour(name, index) { return this.options.colors?.[index] ?? CATEGORIES[name] ?? PALETTE[index % PALETTE.length]; }

    hover(element, text, row, column) {
      element.addEventListener("mousemove", (event) => tip.show(event, text));
      element.addEventListener("mouseout", () => tip.hide());
      element.addEventListener("click", () => { this.selection = [{ row, column }]; this.fire("select"); });
    }

    key(x, y, name, index) {
      svg(this.canvas, "rect", { x, y: y - 10, width: 12, height: 12, fill: this.colour(name, index) });
    }

    legend(names, y) {
      let x = this.area.left;
      names.forEach((name, index) => {
        this.key(x, y, name, index);
        x += 34 + label(this.canvas, x + 17, y, name).getComputedTextLength();
      });
    }
  }

  class PieChart extends Chart {
    paint() {
      const rows = this.table.rows;
      const total = rows.reduce((sum, row) => sum + number(row[1]), 0) || 1;
      const top = this.options.title ? 30 : 10;
      const radius = Math.min(this.height - top - 10, this.width * 0.36) / 2; // leaves room for the legend
      const [x, y] = [radius + 12, top + radius];
      const inner = radius * (this.options.pieHole ?? 0);
      const point = (r, angle) => `${x + r * Math.cos(angle)} ${y + r * Math.sin(angle)}`;
      let angle = -Math.PI / 2;
      rows.forEach((row, index) => {
        const [from, share] = [angle, number(row[1]) / total];
        angle += Math.min(share, 0.999999) * 2 * Math.PI; // an arc over the whole circle would be none
        const large = share > 0.5 ? 1 : 0;
        const slice = svg(this.canvas, "path", {
          d: `M${point(radius, from)} A${radius} ${radius} 0 ${large} 1 ${point(radius, angle)} ` +
             `L${point(inner, angle)} A${inner} ${inner} 0 ${large} 0 ${point(inner, from)} Z`,
          fill: this.colour(row[0], index), stroke: "var(--paper)",
        });
        const percent = `${(100 * share).toFixed(1)}%`;
        const text = `${row[0]}\n${shown(row[1])} (${percent})`;
        this.hover(slice, text, index);
        const line = top + 14 + 18 * index;
        if (this.options.legend === "none" || line > this.height) return;
        const left = 2 * radius + 30;
        this.key(left, line, row[0], index);
        const name = short(String(row[0]), Math.floor((this.width - left - 62) / CHARACTER));
        this.hover(label(this.canvas, left + 17, line, `${name} ${percent}`), text, index);
      });
    }
  }

  // Charts with values to the left, and for some series to the right.
  class AxisChart extends Chart {
    paint() {
      const top = this.options.title ? 30 : 10;
      const series = this.table.series;
      const right = series.some((_, index) => this.axis(index) === 1);
      this.area = { left: 80, top, width: this.width - (right ? 160 : 100), height: this.height - top - 70 };
      const axes = right ? [0, 1] : [0];
      this.scales = axes.map((axis) => this.scale(series.filter((_, index) => this.axis(index) === axis)));
      this.grid();
      this.body(series);
      this.legend(series.map((each) => each.name), this.height - 8);
    }

    get stacked() { return this.options.isStacked; }
    axis(index) { return this.options.series?.[index]?.targetAxisIndex ?? 0; }
    y(amount, axis = 0) {
      const marks = this.scales[axis];
      return this.area.top + this.area.height * (1 - (amount - marks[0]) / (marks.at(-1) - marks[0]));
    }

    scale(series) {
      let [least, largest] = [0, 0];
      for (const row of this.table.rows) {
        const numbers = series.map((each) => number(row[each.index]));
        least = Math.min(least, ...numbers);
        largest = Math.max(largest, ...(this.stacked ? [numbers.reduce((total, each) => total + each, 0)] : numbers));
      }
      return ticks(least, largest || (least ? 0 : 1));
    }

    grid() {
      const { left, width, top, height } = this.area;
      for (const mark of this.scales[0]) {
        const y = this.y(mark);
        svg(this.canvas, "line", { x1: left, x2: left + width, y1: y, y2: y, stroke: "currentColor", opacity: 0.15 });
        label(this.canvas, left - 6, y + 4, format(mark), { "text-anchor": "end" });
      }
      for (const mark of this.scales[1] ?? []) label(this.canvas, left + width + 6, this.y(mark, 1) + 4, format(mark));
      const middle = top + height / 2;
      const turned = { transform: `rotate(-90 14 ${middle})`, "text-anchor": "middle", "font-style": "italic" };
      label(this.canvas, 14, middle, this.options.vAxis?.title ?? "", turned);
      const below = { "text-anchor": "middle", "font-style": "italic" };
      label(this.canvas, left + width / 2, top + height + 38, this.options.hAxis?.title ?? "", below);
    }

    line(points, name, index) {
      const stroke = this.colour(name, index);
      svg(this.canvas, "polyline", { points: points.join(" "), fill: "none", stroke, "stroke-width": 2 });
    }
  }

  // A category of the first column has bars beside or on top of each other; series of the type `line` join points.
  class BarChart extends AxisChart {
    body(series) {
      const rows = this.table.rows;
      const slot = this.area.width / Math.max(rows.length, 1);
      const isLine = (index) => this.options.series?.[index]?.type === "line";
      const wide = (slot * 0.7) / (this.stacked ? 1 : series.filter((_, index) => !isLine(index)).length);
      const middle = (row) => this.area.left + slot * (row + 0.5);
      const every = Math.ceil(60 / slot); // label as many as there is room for
      rows.forEach((row, at) => {
        let base = 0;
        series.forEach((each, index) => {
          const text = each.tooltip ? plain(row[each.tooltip]) : `${row[0]}\n${each.name}: ${shown(row[each.index])}`;
          const [amount, axis, fill] = [number(row[each.index]), this.axis(index), this.colour(each.name, index)];
          if (isLine(index)) {
            const dot = svg(this.canvas, "circle", { cx: middle(at), cy: this.y(amount, axis), r: 4, fill });
            return this.hover(dot, text, at, each.index);
          }
          const x = middle(at) - slot * 0.35 + (this.stacked ? 0 : wide * index);
          const [from, to] = [this.y(base, axis), this.y(base + amount, axis)];
          const bar = svg(this.canvas, "rect", {
            x, y: Math.min(from, to), width: Math.max(wide, 0.5), height: Math.abs(from - to), fill,
          });
          this.hover(bar, text, at, each.index);
          if (this.stacked) base += amount;
        });
        if (at % every) return;
        const name = short(String(row[0]), Math.floor((slot * every) / CHARACTER));
        const below = this.area.top + this.area.height + 18;
        this.hover(label(this.canvas, middle(at), below, name, { "text-anchor": "middle" }), String(row[0]), at);
      });
      series.forEach((each, index) => {
        const points = rows.map((row, at) => `${middle(at)},${this.y(number(row[each.index]), this.axis(index))}`);
        if (isLine(index)) this.line(points, each.name, index);
      });
    }
  }

  // The first column is a time. Dragging zooms in on what was dragged over, a right click shows the whole again.
  class LineChart extends AxisChart {
    get stacked() { return false; }

    draw(table, options) { this.span = null; super.draw(table, options); }

    body(series) {
      const { left, width, top, height } = this.area;
      const rows = this.table.rows;
      const time = (row) => number(row[0]);
      this.span ??= rows.length ? [time(rows[0]), time(rows.at(-1))] : [0, 1];
      const [start, end] = this.span;
      this.x = (at) => left + (width * (at - start)) / (end - start || 1);
      for (const mark of ticks(start, end).filter((each) => each >= start && each <= end)) {
        label(this.canvas, this.x(mark), top + height + 18, format(mark), { "text-anchor": "middle" });
      }
      // Those within the span, and one to each side of it: the curve runs on to the edge, where it is cut.
      const first = Math.max(rows.findIndex((row) => time(row) >= start) - 1, 0);
      const last = rows.findLastIndex((row) => time(row) <= end) + 1;
      const inside = rows.slice(first, last + 1);
      svg(svg(this.canvas, "clipPath", { id: "area" }), "rect", { x: left, y: top - 2, width, height: height + 4 });
      const whole = this.canvas;
      this.canvas = svg(whole, "g", { "clip-path": "url(#area)" });
      series.forEach((each, index) => {
        this.line(inside.map((row) => `${this.x(time(row))},${this.y(number(row[each.index]))}`), each.name, index);
      });
      this.canvas = whole;
      this.marks = svg(whole, "g", {});
      this.listen(series, svg(whole, "rect", { x: left, y: top, width, height, fill: "transparent" }));
    }

    listen(series, surface) {
      const left = this.area.left;
      const place = (event) => {
        const x = event.clientX - this.canvas.getBoundingClientRect().left;
        return Math.min(Math.max(x, left), left + this.area.width);
      };
      const brush = svg(this.canvas, "rect", { y: this.area.top, height: this.area.height, opacity: 0.2 });
      brush.style.pointerEvents = "none";
      let from = null;
      surface.addEventListener("pointerdown", (event) => {
        if (event.button !== 0) return;
        from = place(event);
        surface.setPointerCapture(event.pointerId);
      });
      surface.addEventListener("pointermove", (event) => {
        const to = place(event);
        if (from === null) return this.describe(event, series, to);
        tip.hide();
        brush.setAttribute("x", Math.min(from, to));
        brush.setAttribute("width", Math.abs(to - from));
      });
      surface.addEventListener("pointerup", (event) => {
        const [start, end] = [from, place(event)].sort((a, b) => a - b);
        if (from !== null && end - start > 5) this.zoom([this.time(start), this.time(end)]);
        from = null;
      });
      surface.addEventListener("pointerleave", () => tip.hide());
      surface.addEventListener("contextmenu", (event) => { event.preventDefault(); this.zoom(null); });
    }

    time(x) { return this.span[0] + ((x - this.area.left) / this.area.width) * (this.span[1] - this.span[0]); }

    zoom(span) { this.span = span; this.redraw(); this.mark(); }

    // What the curves are at the place of the mouse: what they were at the last row before it.
    describe(event, series, x) {
      const row = this.table.rows.findLast((each) => number(each[0]) <= this.time(x)) ?? this.table.rows[0];
      const amounts = series.map((each) => `${each.name}: ${shown(row[each.index])}`);
      tip.show(event, [`${this.table.columns[0].label}: ${shown(row[0])}`, ...amounts].join("\n"));
    }

    mark() {
      this.marks?.replaceChildren();
      for (const { row, column } of this.selection) {
        const cells = this.table.rows[row];
        const place = { cx: this.x(number(cells[0])), cy: this.y(number(cells[column])) };
        svg(this.marks, "circle", { ...place, r: 5, fill: "none", stroke: "currentColor", "stroke-width": 2 });
      }
    }

    getChartLayoutInterface() {
      return { getChartAreaBoundingBox: () => this.area, getHAxisValue: (x) => this.time(x) };
    }
  }

  class Timeline extends Chart {
    paint() {
      const rows = this.table.rows;
      const layers = [...new Set(rows.map((row) => row[0]))];
      const edges = []; // of each layer, where its last bar ends: those too thin to be seen beside it are left out
      const start = rows.reduce((least, row) => Math.min(least, row[3]), Infinity);
      const scale = this.width / (rows.reduce((largest, row) => Math.max(largest, row[4]), -Infinity) - start || 1);
      rows.forEach((row, index) => {
        const [x, layer] = [(row[3] - start) * scale, layers.indexOf(row[0])];
        const [wide, fill] = [Math.max((row[4] - row[3]) * scale, 0.5), PALETTE[index % PALETTE.length]];
        if (x + wide < edges[layer] + 0.5) return;
        edges[layer] = x + wide;
        const [bar, y] = [svg(this.canvas, "g", {}), layer * 40];
        svg(bar, "rect", { x, y, width: wide, height: 34, fill, stroke: "var(--paper)" });
        const room = Math.floor((wide - 8) / CHARACTER);
        if (room > 3) label(bar, x + 4, y + 21, short(row[1], room), { fill: inkOn(fill) });
        this.hover(bar, plain(row[2]), index);
      });
    }
  }

  // All rows at once: the tables drawn here have a row for each category, or kind of communication.
  class Table extends Chart {
    draw(table, options = {}) {
      this.order = { column: options.sortColumn, ascending: options.sortAscending ?? true };
      super.draw(table, options);
    }

    redraw() {
      const { columns, rows, properties } = this.table;
      this.clearChart();
      this.width = this.place.clientWidth;
      Object.assign(this.place.style, { maxHeight: "100%", overflow: "auto" });
      const grid = html(this.place, "table", { borderCollapse: "collapse", width: "100%", font: `12px ${FONT}` });
      const head = html(html(grid, "thead", {}), "tr", {});
      const cell = { border: "1px solid var(--line)", padding: "1px 8px" };
      columns.forEach((each, index) => {
        const { column, ascending } = this.order;
        const arrow = index === column ? (ascending ? " ▲" : " ▼") : "";
        const title = html(head, "th", { ...cell, cursor: "pointer", textAlign: "left" }, (each.label ?? "") + arrow);
        title.addEventListener("click", () => {
          this.order = { column: index, ascending: index === column ? !ascending : false };
          this.redraw();
        });
      });
      const body = html(grid, "tbody", {});
      for (const at of this.sorted()) {
        const line = html(body, "tr", {});
        rows[at].forEach((each, index) => {
          const field = html(line, "td", cell, this.options.allowHtml ? plain(shown(each)) : shown(each));
          field.style.textAlign = columns[index].type === "number" ? "right" : "left";
          // The one style that the page asks for is a grey background, too light for a dark page.
          if (properties.has(`${at},${index},style`)) field.style.background = "var(--shade)";
        });
      }
    }

    sorted() {
      const { column, ascending } = this.order;
      const numbers = this.table.rows.map((_, index) => index);
      if (!(column >= 0)) return numbers;
      const key = (at) => value(this.table.rows[at][column]);
      return numbers.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (ascending ? 1 : -1));
    }
  }

  window.google = {
    charts: { load: () => Promise.resolve() },
    visualization: {
      DataTable, arrayToDataTable, PieChart, LineChart, Timeline, Table,
      ColumnChart: BarChart, SteppedAreaChart: BarChart, ComboChart: BarChart,
      events: { addListener: (chart, event, listener) => chart.on(event, listener) },
    },
  };
})();
