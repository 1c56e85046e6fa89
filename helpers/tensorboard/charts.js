// Draws the charts and tables of the profiler tab, in the place of Google's chart loader: without internet.
//
// The page asks for six kinds of chart and one of table through `google.visualization`; here they are as SVG and
// HTML, with no more of that interface than the page uses. All text is set as text, never as HTML: names in a trace
// may be anyone's.
(() => {
  "use strict";

  // A category has the colour that it has in the notebooks' figures (Okabe and Ito's palette).
  const CATEGORIES = {
    Kernel: "#009E73", Memcpy: "#F0E442", Memset: "#CC79A7", Communication: "#000000", Runtime: "#56B4E9",
    DataLoader: "#D55E00", "CPU Exec": "#0072B2", Other: "#BBBBBB",
  };
  const PALETTE = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8C9BA5"];
  const FONT = "Roboto, Helvetica, Arial, sans-serif";

  const value = (cell) => (cell !== null && typeof cell === "object" && "v" in cell ? cell.v : cell);
  const shown = (cell) => {
    if (cell !== null && typeof cell === "object" && "f" in cell) return cell.f;
    return typeof cell === "number" ? cell.toLocaleString("en", { maximumFractionDigits: 2 }) : String(cell ?? "");
  };
  const plain = (markup) => String(markup ?? "").replace(/<br\s*\/?>/g, "\n").replace(/<[^>]*>/g, "");

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

  function ticks(least, largest) {
    const rough = (largest - least) / 5 || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough);
    const [from, to] = [Math.floor(least / step + 1e-9), Math.ceil(largest / step - 1e-9)];
    return Array.from({ length: to - from + 1 }, (_, index) => (from + index) * step);
  }

  class Chart {
    constructor(place) { this.place = place; this.listeners = {}; this.selection = []; }
    on(event, listener) { (this.listeners[event] ??= []).push(listener); }
    fire(event, detail) { (this.listeners[event] ?? []).forEach((listener) => listener(detail)); }
    clearChart() { this.place.replaceChildren(); }
    getSelection() { return this.selection; }
    setSelection(selection) { this.selection = selection ?? []; this.mark(); }
    mark() {}

    draw(table, options = {}) {
      this.clearChart();
      this.table = table;
      this.options = options;
      this.width = this.place.clientWidth || 600;
      this.height = parseFloat(options.height) || this.place.clientHeight || 300;
      this.canvas = svg(this.place, "svg", {
        width: this.width, height: this.height, role: "img", "aria-label": options.title || "chart",
      });
      if (options.title) label(this.canvas, 8, 18, options.title, { "font-weight": "bold", "font-size": 14 });
      this.paint();
      this.fire("ready");
    }

    colour(name, index) { return this.options.colors?.[index] ?? CATEGORIES[name] ?? PALETTE[index % PALETTE.length]; }

    hover(element, text, row, column) {
      svg(element, "title", {}, text);
      element.addEventListener("mouseover", () => this.fire("onmouseover", { row, column }));
      element.addEventListener("mouseout", () => this.fire("onmouseout", { row, column }));
      element.addEventListener("click", () => { this.selection = [{ row, column }]; this.fire("select"); });
    }

    legend(names, y) {
      let x = this.area?.left ?? 8;
      names.forEach((name, index) => {
        svg(this.canvas, "rect", { x, y: y - 10, width: 12, height: 12, fill: this.colour(name, index) });
        x += 24 + label(this.canvas, x + 17, y, name).getComputedTextLength() + 10;
      });
    }
  }

  class PieChart extends Chart {
    paint() {
      const rows = this.table.rows;
      const total = rows.reduce((sum, row) => sum + value(row[1]), 0) || 1;
      const top = this.options.title ? 30 : 10;
      const radius = Math.min(this.height - top - 10, this.width * 0.32) / 2; // leaves room for the legend
      const [x, y] = [radius + 12, top + radius];
      let angle = -Math.PI / 2;
      rows.forEach((row, index) => {
        const [from, share] = [angle, value(row[1]) / total];
        angle += Math.min(share, 0.999999) * 2 * Math.PI; // an arc over the whole circle would be none
        const point = (r, a) => `${x + r * Math.cos(a)} ${y + r * Math.sin(a)}`;
        const large = share > 0.5 ? 1 : 0;
        const inner = radius * (this.options.pieHole ?? 0);
        const slice = svg(this.canvas, "path", {
          d: `M${point(radius, from)} A${radius} ${radius} 0 ${large} 1 ${point(radius, angle)} ` +
             `L${point(inner, angle)} A${inner} ${inner} 0 ${large} 0 ${point(inner, from)} Z`,
          fill: this.colour(row[0], index), stroke: "white",
        });
        const percent = `${(100 * share).toFixed(1)}%`;
        this.hover(slice, `${row[0]}\n${shown(row[1])} (${percent})`, index);
        const line = top + 14 + 18 * index;
        if (this.options.legend !== "none" && line < this.height) {
          const left = 2 * radius + 30;
          svg(this.canvas, "rect", { x: left, y: line - 10, width: 12, height: 12, fill: this.colour(row[0], index) });
          const room = Math.max(Math.floor((this.width - left - 75) / 7), 8);
          const name = String(row[0]).length > room ? `${String(row[0]).slice(0, room - 1)}…` : row[0];
          svg(label(this.canvas, left + 17, line, `${name} ${percent}`), "title", {}, `${row[0]} ${percent}`);
        }
      });
    }
  }

  // Charts with a category axis below and values to the left: bars beside or on top of each other, areas, lines.
  class AxisChart extends Chart {
    paint() {
      const series = this.table.series;
      const title = this.options.title ? 30 : 10;
      this.area = { left: 80, top: title, width: this.width - 100, height: this.height - title - 70 };
      let [least, largest] = [0, 0];
      for (const row of this.table.rows) {
        const numbers = series.map((each) => value(row[each.index]) || 0);
        const sum = numbers.reduce((total, number) => total + number, 0);
        least = Math.min(least, ...numbers);
        largest = Math.max(largest, ...(this.stacked ? [sum] : numbers));
      }
      const marks = ticks(least, largest || 1);
      const [bottom, range] = [marks[0], marks.at(-1) - marks[0]];
      this.y = (number) => this.area.top + this.area.height * (1 - (number - bottom) / range);
      this.grid(marks);
      this.body(series);
      this.legend(series.map((each) => each.name), this.height - 8);
    }

    get stacked() { return this.options.isStacked; }

    grid(marks) {
      const { left, width, top, height } = this.area;
      for (const mark of marks) {
        const y = this.y(mark);
        svg(this.canvas, "line", { x1: left, x2: left + width, y1: y, y2: y, stroke: "currentColor", opacity: 0.15 });
        label(this.canvas, left - 6, y + 4, mark.toLocaleString("en"), { "text-anchor": "end" });
      }
      if (this.options.vAxis?.title) {
        const middle = top + height / 2;
        const turn = { transform: `rotate(-90 14 ${middle})`, "text-anchor": "middle", "font-style": "italic" };
        label(this.canvas, 14, middle, this.options.vAxis.title, turn);
      }
      if (this.options.hAxis?.title) {
        const below = { "text-anchor": "middle", "font-style": "italic" };
        label(this.canvas, left + width / 2, top + height + 38, this.options.hAxis.title, below);
      }
    }

    body(series) {
      const { left, width, top, height } = this.area;
      const rows = this.table.rows;
      const slot = width / Math.max(rows.length, 1);
      const line = (index) => this.options.series?.[index]?.type === "line";
      const bars = this.stacked ? 1 : series.filter((_, index) => !line(index)).length;
      const wide = (slot * 0.7) / bars;
      const middle = (number) => left + slot * (number + 0.5);
      const every = Math.ceil(rows.length / Math.max(width / 60, 1)); // label as many as there is room for
      rows.forEach((row, number) => {
        let base = 0;
        series.forEach((each, index) => {
          if (line(index)) return;
          const amount = value(row[each.index]) || 0;
          const x = middle(number) - slot * 0.35 + (this.stacked ? 0 : wide * index);
          const [from, to] = [this.y(base), this.y(base + amount)];
          const bar = svg(this.canvas, "rect", {
            x, y: Math.min(from, to), width: Math.max(wide, 0.5), height: Math.abs(from - to),
            fill: this.colour(each.name, index),
          });
          const text = each.tooltip ? plain(row[each.tooltip]) : `${row[0]}\n${each.name}: ${shown(row[each.index])}`;
          this.hover(bar, text, number, each.index);
          if (this.stacked) base += amount;
        });
        if (number % every === 0) {
          const name = String(row[0]).slice(0, Math.max(Math.floor((slot * every) / 7), 3));
          label(this.canvas, middle(number), top + height + 18, name, { "text-anchor": "middle" });
        }
      });
      series.forEach((each, index) => {
        if (!line(index)) return;
        const points = rows.map((row, number) => `${middle(number)},${this.y(value(row[each.index]) || 0)}`);
        const stroke = this.colour(each.name, index);
        svg(this.canvas, "polyline", { points: points.join(" "), fill: "none", stroke, "stroke-width": 2 });
      });
    }
  }

  class ColumnChart extends AxisChart {}
  class SteppedAreaChart extends AxisChart {}
  class ComboChart extends AxisChart {}

  class LineChart extends AxisChart {
    get stacked() { return false; }

    body(series) {
      const { left, width, top, height } = this.area;
      const rows = this.table.rows;
      const times = rows.map((row) => value(row[0]));
      this.span = [times[0] ?? 0, times.at(-1) ?? 1];
      const range = this.span[1] - this.span[0] || 1;
      this.x = (time) => left + (width * (time - this.span[0])) / range;
      for (let mark = 0; mark <= 5; mark += 1) {
        const time = this.span[0] + (range * mark) / 5;
        label(this.canvas, this.x(time), top + height + 18, shown(time), { "text-anchor": "middle" });
      }
      series.forEach((each, index) => {
        const points = rows.map((row) => `${this.x(value(row[0]))},${this.y(value(row[each.index]) || 0)}`);
        const stroke = this.colour(each.name, index);
        svg(this.canvas, "polyline", { points: points.join(" "), fill: "none", stroke, "stroke-width": 2 });
      });
      this.marks = svg(this.canvas, "g", {});
    }

    mark() {
      this.marks?.replaceChildren();
      for (const { row, column } of this.selection) {
        const cells = this.table.rows[row];
        const place = { cx: this.x(value(cells[0])), cy: this.y(value(cells[column])) };
        svg(this.marks, "circle", { ...place, r: 5, fill: "none", stroke: "currentColor", "stroke-width": 2 });
      }
    }

    getChartLayoutInterface() {
      const { left, top, width, height } = this.area;
      return {
        getChartAreaBoundingBox: () => ({ left, top, width, height }),
        getHAxisValue: (x) => this.span[0] + ((x - left) / width) * (this.span[1] - this.span[0]),
      };
    }
  }

  class Timeline extends Chart {
    paint() {
      const rows = this.table.rows;
      const layers = [...new Set(rows.map((row) => row[0]))];
      const start = Math.min(...rows.map((row) => row[3]));
      const scale = this.width / (Math.max(...rows.map((row) => row[4])) - start || 1);
      rows.forEach((row, index) => {
        const bar = svg(this.canvas, "g", {});
        const [x, y] = [(row[3] - start) * scale, layers.indexOf(row[0]) * 40];
        const wide = Math.max((row[4] - row[3]) * scale, 0.5);
        svg(bar, "rect", { x, y, width: wide, height: 34, fill: PALETTE[index % PALETTE.length], stroke: "white" });
        const room = Math.floor(wide / 7);
        if (room > 3) label(bar, x + 4, y + 21, row[1].slice(0, room), { fill: "white" });
        this.hover(bar, plain(row[2]), index);
      });
    }
  }

  class Table extends Chart {
    draw(table, options = {}) {
      this.table = table;
      this.options = options;
      this.page = 0;
      this.order = { column: options.sortColumn, ascending: options.sortAscending ?? true };
      this.paint();
      this.fire("ready");
    }

    paint() {
      const { columns, rows, properties } = this.table;
      const size = this.options.pageSize ?? rows.length;
      const numbers = rows.map((_, index) => index);
      const { column, ascending } = this.order;
      if (column !== undefined && column >= 0) {
        const key = (number) => value(rows[number][column]);
        numbers.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (ascending ? 1 : -1));
      }
      this.clearChart();
      const grid = html(this.place, "table", { borderCollapse: "collapse", width: "100%", font: `13px ${FONT}` });
      const head = html(html(grid, "thead", {}), "tr", {});
      const cell = { border: "1px solid #E0E0E0", padding: "4px 8px" };
      columns.forEach((each, index) => {
        const arrow = index === column ? (ascending ? " ▲" : " ▼") : "";
        const title = html(head, "th", { ...cell, cursor: "pointer", textAlign: "left" }, (each.label ?? "") + arrow);
        title.addEventListener("click", () => {
          this.order = { column: index, ascending: index === column ? !ascending : false };
          this.paint();
        });
      });
      const body = html(grid, "tbody", {});
      for (const number of numbers.slice(this.page * size, (this.page + 1) * size)) {
        const line = html(body, "tr", {});
        rows[number].forEach((each, index) => {
          const align = columns[index].type === "number" ? "right" : "left";
          const text = this.options.allowHtml ? plain(shown(each)) : shown(each);
          const field = html(line, "td", { ...cell, textAlign: align }, text);
          field.style.cssText += `;${properties.get(`${number},${index},style`) ?? ""}`;
        });
      }
      const pages = Math.ceil(rows.length / (size || 1));
      if (pages > 1) {
        const bar = html(this.place, "div", { font: `13px ${FONT}`, padding: "6px" });
        for (const [text, change] of [["‹", -1], ["›", 1]]) {
          const button = html(bar, "button", { margin: "0 6px" }, text);
          button.disabled = this.page + change < 0 || this.page + change >= pages;
          button.addEventListener("click", () => { this.page += change; this.paint(); });
        }
        html(bar, "span", {}, `page ${this.page + 1} of ${pages}`);
      }
    }
  }

  window.google = {
    charts: { load: () => Promise.resolve(), setOnLoadCallback: (callback) => callback() },
    visualization: {
      DataTable, arrayToDataTable, PieChart, ColumnChart, SteppedAreaChart, ComboChart, LineChart, Timeline, Table,
      events: { addListener: (chart, event, listener) => chart.on(event, listener) },
    },
  };
})();
