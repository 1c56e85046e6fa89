// Draws the charts and tables of the profiler tab without internet, instead of Google's chart loader.
//
// The page uses six kinds of chart and one kind of table of `google.visualization`; this file draws them as SVG and
// HTML, with only the part of that interface that the page uses. All text is set as text, never as HTML, since anyone
// may have written the names in a trace. look.css has the styles.
(() => {
  "use strict";

  // Each category has its colour of the notebooks' figures (Okabe and Ito's palette).
  const CATEGORIES = {
    Kernel: "#009E73", Memcpy: "#F0E442", Memset: "#CC79A7", Communication: "currentColor", Runtime: "#56B4E9",
    DataLoader: "#D55E00", "CPU Exec": "#0072B2", Other: "#BBBBBB",
  };
  // Okabe and Ito's palette again, and two colours of Tol's: a pie has ten slices.
  const PALETTE = [
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8C9BA5", "#AA4499", "#999933",
  ];
  const CHARACTER = 6.5; // pixels: about the width of a character at 12 pixels

  const number = (cell) => (cell?.v ?? cell) || 0;
  const format = (amount) => amount.toLocaleString("en", { maximumFractionDigits: 2 });
  const shown = (cell) => cell?.f ?? (typeof cell === "number" ? format(cell) : String(cell ?? ""));
  const short = (text, room) => (text.length > room ? `${text.slice(0, Math.max(room - 1, 1))}…` : text);
  // Removes the plugin's own markup, and all but two decimals; other markup is part of a name.
  const plain = (text) =>
    String(text ?? "").replace(/<br>/g, "\n").replace(/<\/?b>|<\/?div( [^<>]*)?>/g, "").replace(/(\.\d\d)\d+/g, "$1");

  class DataTable {
    constructor() { this.columns = []; this.rows = []; this.shaded = new Set(); }
    addColumn(column) { this.columns.push({ ...column }); }
    addRow(row) { this.rows.push(row); }
    addRows(rows) { this.rows = this.rows.concat(rows); }
    // The only style that the page sets is a grey background.
    setProperty(row, column) { this.shaded.add(`${row},${column}`); }

    // The columns of values, each with the tooltip that follows it, if there is one.
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
    for (const label of header) table.addColumn({ label });
    table.addRows(rows);
    return table;
  }

  // Adds an element of SVG, or of HTML.
  function add(parent, name, attributes = {}, text) {
    const isSvg = name === "svg" || parent instanceof SVGElement;
    const element = document.createElementNS(`http://www.w3.org/${isSvg ? "2000/svg" : "1999/xhtml"}`, name);
    for (const [key, setting] of Object.entries(attributes)) element.setAttribute(key, setting);
    if (text !== undefined) element.textContent = text;
    return parent.appendChild(element);
  }

  const label = (parent, x, y, text, attributes) => add(parent, "text", { x, y, ...attributes }, text);

  function ticks(least, largest) {
    const rough = (largest - least) / 5 || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough);
    const [from, to] = [Math.floor(least / step + 1e-9), Math.ceil(largest / step - 1e-9)];
    return Array.from({ length: to - from + 1 }, (_, index) => (from + index) * step);
  }

  const tip = {
    show(event, text) {
      this.box ??= add(document.body, "div", { class: "chart-tip" });
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
    on(event, listener) { this.listeners[event] = listener; }
    clearChart() { this.place.replaceChildren(); tip.hide(); }
    getSelection() { return this.selection; }
    setSelection(selection) { this.selection = selection ?? []; this.mark(); }
    mark() {}

    draw(table, options) {
      this.table = table;
      this.options = options;
      this.redraw();
      this.place.chart = this; // the page may draw another chart in the same place
      const observer = new ResizeObserver(() => {
        if (this.place.chart !== this) observer.disconnect();
        else if (this.place.clientWidth && this.place.clientWidth !== this.width) this.redraw();
      });
      observer.observe(this.place);
      this.listeners.ready?.();
    }

    redraw() {
      this.clearChart();
      const { title, height } = this.options;
      this.width = this.place.clientWidth || 600;
      this.height = parseFloat(height) || this.place.clientHeight || 300;
      this.top = title ? 30 : 10;
      const size = { width: this.width, height: this.height };
      this.canvas = add(this.place, "svg", { ...size, class: "chart", role: "img", "aria-label": title || "chart" });
      if (title) label(this.canvas, 8, 16, title, { class: "title" });
      this.paint();
    }

    colour(name, index) { return this.options.colors?.[index] ?? CATEGORIES[name] ?? PALETTE[index % PALETTE.length]; }

    hover(element, text, row, column) {
      element.addEventListener("mousemove", (event) => tip.show(event, text));
      element.addEventListener("mouseout", () => tip.hide());
      element.addEventListener("click", () => {
        this.selection = [{ row, column }];
        this.listeners.select?.();
      });
    }

    // Draws a line of the legend and returns its text.
    key(x, y, name, index, text = name) {
      add(this.canvas, "rect", { x, y: y - 10, width: 12, height: 12, fill: this.colour(name, index) });
      return label(this.canvas, x + 17, y, text);
    }
  }

  class PieChart extends Chart {
    paint() {
      const { rows } = this.table;
      const total = rows.reduce((sum, row) => sum + number(row[1]), 0) || 1;
      const radius = Math.min(this.height - this.top - 10, this.width * 0.36) / 2; // leaves room for the legend
      const [x, y] = [radius + 12, this.top + radius];
      const inner = radius * this.options.pieHole;
      const point = (r, angle) => `${x + r * Math.cos(angle)} ${y + r * Math.sin(angle)}`;
      let angle = -Math.PI / 2;
      rows.forEach((row, index) => {
        const [from, share] = [angle, number(row[1]) / total];
        angle += Math.min(share, 0.999999) * 2 * Math.PI; // an arc of a full circle would be empty
        const large = share > 0.5 ? 1 : 0;
        const d = `M${point(radius, from)} A${radius} ${radius} 0 ${large} 1 ${point(radius, angle)} ` +
          `L${point(inner, angle)} A${inner} ${inner} 0 ${large} 0 ${point(inner, from)} Z`;
        const slice = add(this.canvas, "path", { d, fill: this.colour(row[0], index), class: "part" });
        const percent = `${(100 * share).toFixed(1)}%`;
        const text = `${row[0]}\n${shown(row[1])} (${percent})`;
        this.hover(slice, text, index);
        const line = this.top + 14 + 18 * index;
        if (this.options.legend === "none" || line > this.height) return;
        const left = 2 * radius + 30;
        const name = short(String(row[0]), Math.floor((this.width - left - 62) / CHARACTER));
        this.hover(this.key(left, line, row[0], index, `${name} ${percent}`), text, index);
      });
    }
  }

  // Charts with values to the left, and for some series to the right.
  class AxisChart extends Chart {
    paint() {
      const { series } = this.table;
      const onAxis = [0, 1].map((axis) => series.filter((_, index) => this.axis(index) === axis));
      const right = onAxis[1].length;
      const [width, height] = [this.width - (right ? 160 : 100), this.height - this.top - 70];
      this.area = { left: 80, top: this.top, width, height };
      this.scales = onAxis.map((those) => this.scale(those));
      this.grid(right);
      this.body(series);
      let x = this.area.left;
      series.forEach(({ name }, index) => {
        x += 34 + this.key(x, this.height - 8, name, index).getComputedTextLength();
      });
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
        const numbers = series.map(({ index }) => number(row[index]));
        least = Math.min(least, ...numbers);
        largest = Math.max(largest, ...(this.stacked ? [numbers.reduce((total, each) => total + each, 0)] : numbers));
      }
      return ticks(least, largest || (least ? 0 : 1));
    }

    grid(right) {
      const { left, width, top, height } = this.area;
      for (const mark of this.scales[0]) {
        const y = this.y(mark);
        add(this.canvas, "line", { x1: left, x2: left + width, y1: y, y2: y });
        label(this.canvas, left - 6, y + 4, format(mark), { "text-anchor": "end" });
      }
      for (const mark of right ? this.scales[1] : []) {
        label(this.canvas, left + width + 6, this.y(mark, 1) + 4, format(mark));
      }
      const middle = top + height / 2;
      const turned = { transform: `rotate(-90 14 ${middle})`, class: "axis" };
      label(this.canvas, 14, middle, this.options.vAxis?.title ?? "", turned);
      label(this.canvas, left + width / 2, top + height + 38, this.options.hAxis?.title ?? "", { class: "axis" });
    }

    line(parent, points, name, index) {
      add(parent, "polyline", { points: points.join(" "), fill: "none", stroke: this.colour(name, index) });
    }
  }

  // Each category of the first column has bars beside or on top of each other; series of type `line` join points.
  class BarChart extends AxisChart {
    body(series) {
      const { rows } = this.table;
      const slot = this.area.width / Math.max(rows.length, 1);
      const isLine = (index) => this.options.series?.[index]?.type === "line";
      const wide = (slot * 0.7) / (this.stacked ? 1 : series.filter((_, index) => !isLine(index)).length);
      const middle = (at) => this.area.left + slot * (at + 0.5);
      const every = Math.ceil(60 / slot); // label as many bars as there is room for
      rows.forEach((row, at) => {
        let base = 0;
        series.forEach((column, index) => {
          const [amount, axis, fill] = [number(row[column.index]), this.axis(index), this.colour(column.name, index)];
          const [from, to] = [this.y(base, axis), this.y(base + amount, axis)];
          const x = middle(at) - slot * 0.35 + (this.stacked ? 0 : wide * index);
          const bar = { x, y: Math.min(from, to), width: Math.max(wide, 0.5), height: Math.abs(from - to), fill };
          const mark = isLine(index)
            ? add(this.canvas, "circle", { cx: middle(at), cy: to, r: 4, fill })
            : add(this.canvas, "rect", bar);
          const text = `${row[0]}\n${column.name}: ${shown(row[column.index])}`;
          this.hover(mark, column.tooltip ? plain(row[column.tooltip]) : text, at, column.index);
          if (this.stacked) base += amount;
        });
        if (at % every) return;
        const name = short(String(row[0]), Math.floor((slot * every) / CHARACTER));
        const below = this.area.top + this.area.height + 18;
        this.hover(label(this.canvas, middle(at), below, name, { "text-anchor": "middle" }), String(row[0]), at);
      });
      series.forEach((column, index) => {
        const points = rows.map((row, at) => `${middle(at)},${this.y(number(row[column.index]), this.axis(index))}`);
        if (isLine(index)) this.line(this.canvas, points, column.name, index);
      });
    }
  }

  // The first column is a time. Dragging zooms in on the dragged range, a right click shows the whole range again.
  class LineChart extends AxisChart {
    get stacked() { return false; }

    draw(table, options) { this.span = null; super.draw(table, options); }

    body(series) {
      const { left, width, top, height } = this.area;
      const { rows } = this.table;
      const time = (row) => number(row[0]);
      this.span ??= rows.length ? [time(rows[0]), time(rows.at(-1))] : [0, 1];
      const [start, end] = this.span;
      this.x = (at) => left + (width * (at - start)) / (end - start || 1);
      for (const mark of ticks(start, end).filter((each) => each >= start && each <= end)) {
        label(this.canvas, this.x(mark), top + height + 18, format(mark), { "text-anchor": "middle" });
      }
      // The rows within the span, and one on each side: the curve reaches the edge, where it is cut.
      const first = Math.max(rows.findIndex((row) => time(row) >= start) - 1, 0);
      const inside = rows.slice(first, rows.findLastIndex((row) => time(row) <= end) + 2);
      add(add(this.canvas, "clipPath", { id: "area" }), "rect", { x: left, y: top - 2, width, height: height + 4 });
      const curves = add(this.canvas, "g", { "clip-path": "url(#area)" });
      series.forEach((column, index) => {
        const points = inside.map((row) => `${this.x(time(row))},${this.y(number(row[column.index]))}`);
        this.line(curves, points, column.name, index);
      });
      this.marks = add(this.canvas, "g");
      this.listen(add(this.canvas, "rect", { x: left, y: top, width, height, fill: "transparent" }));
    }

    listen(surface) {
      const { left, width, top, height } = this.area;
      const brush = add(this.canvas, "rect", { y: top, height, class: "brush" });
      const place = (event) => {
        const x = event.clientX - this.canvas.getBoundingClientRect().left;
        return Math.min(Math.max(x, left), left + width);
      };
      let from = null;
      surface.addEventListener("pointerdown", (event) => {
        if (event.button !== 0) return;
        from = place(event);
        surface.setPointerCapture(event.pointerId);
      });
      surface.addEventListener("pointermove", (event) => {
        const to = place(event);
        if (from === null) return this.describe(event, this.time(to));
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

    // The values of the curves at the mouse, from the last row before the mouse.
    describe(event, time) {
      const { columns, rows, series } = this.table;
      const row = rows.findLast((each) => number(each[0]) <= time) ?? rows[0];
      const amounts = series.map(({ index, name }) => `${name}: ${shown(row[index])}`);
      tip.show(event, [`${columns[0].label}: ${shown(row[0])}`, ...amounts].join("\n"));
    }

    mark() {
      this.marks?.replaceChildren();
      for (const { row, column } of this.selection) {
        const cells = this.table.rows[row];
        const place = { cx: this.x(number(cells[0])), cy: this.y(number(cells[column])) };
        add(this.marks, "circle", { ...place, r: 5, class: "mark" });
      }
    }

    getChartLayoutInterface() {
      return { getChartAreaBoundingBox: () => this.area, getHAxisValue: (x) => this.time(x) };
    }
  }

  class Timeline extends Chart {
    paint() {
      const { rows } = this.table;
      const edges = []; // where the last bar of each layer ends: bars too thin to be seen beside it are left out
      const start = rows.reduce((least, row) => Math.min(least, row[3]), Infinity);
      const scale = this.width / (rows.reduce((largest, row) => Math.max(largest, row[4]), -Infinity) - start || 1);
      rows.forEach(([layer, name, text, begin, end], index) => {
        const [x, y, width] = [(begin - start) * scale, layer * 40, Math.max((end - begin) * scale, 0.5)];
        if (x + width < edges[layer] + 0.5) return;
        edges[layer] = x + width;
        const bar = add(this.canvas, "g");
        add(bar, "rect", { x, y, width, height: 34, fill: PALETTE[index % PALETTE.length], class: "part pale" });
        const room = Math.floor((width - 8) / CHARACTER);
        if (room > 3) label(bar, x + 4, y + 21, short(name, room));
        this.hover(bar, plain(text), index);
      });
    }
  }

  // All rows at once, in the given order: the tables drawn here have a row for each kind of operation.
  class Table extends Chart {
    redraw() {
      const { columns, rows, shaded } = this.table;
      this.clearChart();
      this.width = this.place.clientWidth;
      this.place.classList.add("chart-table");
      const grid = add(this.place, "table");
      const head = add(add(grid, "thead"), "tr");
      for (const column of columns) add(head, "th", {}, column.label ?? "");
      const body = add(grid, "tbody");
      rows.forEach((row, at) => {
        const line = add(body, "tr");
        row.forEach((cell, index) => {
          const kinds = [columns[index].type, shaded.has(`${at},${index}`) ? "shaded" : ""];
          add(line, "td", { class: kinds.join(" ") }, this.options.allowHtml ? plain(shown(cell)) : shown(cell));
        });
      });
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
