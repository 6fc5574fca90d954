"use strict";

// The timeline: lanes of slices over a curve of waiting items; it moves, zooms, and follows an item.
(() => {
  const canvas = document.getElementById("timeline");
  if (!canvas) return;
  const RULER = 26, GROUP = 26, GAP = 10, LANE = 15, LEAST_LANE = 2, MOST_LANES = 72, DEPTH = 16;
  const { tracks } = JSON.parse(document.getElementById("data").textContent);
  const context = canvas.getContext("2d");
  const tip = document.getElementById("tip");
  const status = document.getElementById("chosen");
  let colours = {}, width = 0, height = 0, gutter = 0, chosen = null, hovered = null, drawn = false;

  // Times are nanoseconds since the profile began, each written as the difference to the time before.
  let first = Infinity, last = -Infinity;
  for (const track of tracks) {
    let at = 0;
    track.slices = track.slices.map(([lane, since, duration, ...rest]) => {
      at += since;
      first = Math.min(first, at);
      last = Math.max(last, at + duration);
      const slice = { lane, begin: at, end: at + duration };
      if (track.kind === "node") {
        [slice.item, slice.frame] = rest;
        slice.frames = slice.frame === null ? [] : [slice.frame];
      } else {
        [slice.what, slice.node, slice.items, slice.rows, slice.padding, slice.frames] = rest;
      }
      return slice;
    });
    track.longest = track.slices.reduce((most, slice) => Math.max(most, slice.end - slice.begin), 0);
    const curve = [];
    let moment = 0;
    for (let i = 0; i < track.depths.length; i += 2) {
      moment += track.depths[i];
      curve.push([moment, track.depths[i + 1]]);
    }
    track.curve = curve;
    track.deepest = curve.reduce((most, point) => Math.max(most, point[1]), 0);
  }
  const total = Math.max(last - first, 1);
  const whole = { begin: first - total * 0.01, end: last + total * 0.02 };
  let view = { ...whole };

  const layOut = () => {
    let y = RULER, group = null;
    for (const track of tracks) {
      track.heading = track.group !== group;
      group = track.group;
      if (track.heading) y += GROUP;
      track.top = y;
      track.lane = Math.max(LEAST_LANE, Math.min(LANE, MOST_LANES / track.lanes));
      track.bars = Math.min(track.lane * track.lanes, MOST_LANES);
      track.lane = track.bars / track.lanes;
      y += track.bars + (track.deepest ? DEPTH : 0) + GAP;
    }
    height = y + 4;
    width = canvas.parentElement.clientWidth;
    gutter = Math.min(200, width * 0.3);
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    drawNow(); // a new size empties the canvas, and neither print nor a frame out of view gets an animation frame
  };
  const paint = () => {
    for (const name of ["card", "raised", "line", "text", "soft", "blue", "warm", "compute", "transfer", "compile", "depth"]) {
      canvas.style.color = `var(--${name})`; // a canvas knows no variables
      colours[name] = getComputedStyle(canvas).color;
    }
    draw();
  };

  const scale = () => (width - gutter) / (view.end - view.begin);
  const x = (time) => gutter + (time - view.begin) * scale();
  const time = (at) => view.begin + (at - gutter) / scale();
  const spoken = (nanoseconds) => {
    const [size, unit] = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]].find(([size]) => Math.abs(nanoseconds) >= size) || [1, "ns"];
    return `${Number((nanoseconds / size).toPrecision(3))} ${unit}`;
  };
  const colourOf = (track) => (track.kind === "node" ? (track.limits ? colours.warm : colours.blue) : colours[track.kind]);
  const follows = (slice) => chosen !== null && slice.frames.includes(chosen);

  // Slices of a track are in the order in which they began, so the visible slices begin after a known moment.
  const visible = (track) => {
    let low = 0, high = track.slices.length;
    const from = view.begin - track.longest;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (track.slices[middle].begin < from) low = middle + 1;
      else high = middle;
    }
    return low;
  };

  const drawRuler = () => {
    const rough = (view.end - view.begin) / Math.max(2, (width - gutter) / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "left";
    for (let at = Math.ceil(view.begin / step) * step; at < view.end; at += step) {
      context.fillStyle = colours.line;
      context.fillRect(Math.round(x(at)), RULER - 6, 1, height);
      context.fillStyle = colours.soft;
      context.fillText(Math.abs(at) < step / 2 ? "0" : spoken(at), x(at) + 4, RULER / 2);
    }
  };
  const drawCurve = (track) => {
    if (!track.deepest) return;
    const base = track.top + track.bars + DEPTH;
    const y = (depth) => base - (depth / track.deepest) * (DEPTH - 3);
    context.fillStyle = colours.depth;
    context.beginPath();
    context.moveTo(x(track.curve[0][0]), base);
    let depth = 0;
    for (const [at, next] of track.curve) {
      context.lineTo(x(at), y(depth));
      context.lineTo(x(at), y(next));
      depth = next;
    }
    context.lineTo(x(last), y(depth));
    context.lineTo(x(last), base);
    context.fill();
  };
  const drawSlices = (track) => {
    const colour = colourOf(track);
    const thick = Math.max(1, track.lane - (track.lane > 4 ? 1.5 : 0));
    context.font = "10px system-ui, sans-serif";
    for (let i = visible(track); i < track.slices.length; i += 1) {
      const slice = track.slices[i];
      if (slice.begin > view.end) break;
      if (slice.end < view.begin) continue;
      const left = Math.max(x(slice.begin), gutter), right = Math.min(x(slice.end), width);
      const wide = Math.max(right - left - (right - left > 3 ? 0.6 : 0), 0.8);
      const top = track.top + slice.lane * track.lane;
      context.globalAlpha = chosen === null ? (slice === hovered ? 1 : 0.85) : follows(slice) ? 1 : 0.16;
      context.fillStyle = colour;
      context.fillRect(left, top, wide, thick);
      const label = track.kind === "node" ? (slice.item === null ? "" : `#${slice.item}`) : slice.items ? `${slice.node} ×${slice.items}` : slice.node;
      if (wide > 34 && track.lane > 10 && context.measureText(label).width < wide - 8) {
        context.fillStyle = colours.card;
        context.fillText(label, left + 4, top + thick / 2 + 0.5);
      }
    }
    context.globalAlpha = 1;
  };
  const drawWay = () => {
    if (chosen === null) return;
    const stops = tracks.flatMap((track) =>
      track.slices.filter(follows).map((slice) => ({ slice, y: track.top + (slice.lane + 0.5) * track.lane })));
    stops.sort((a, b) => a.slice.begin - b.slice.begin);
    context.strokeStyle = colours.text;
    context.lineWidth = 1.2;
    context.beginPath();
    stops.slice(1).forEach((stop, i) => {
      const before = stops[i];
      const [fromX, toX] = [x(Math.min(before.slice.end, stop.slice.begin)), x(stop.slice.begin)];
      context.moveTo(fromX, before.y);
      context.bezierCurveTo(fromX + 12, before.y, toX - 12, stop.y, toX, stop.y);
    });
    context.stroke();
  };
  const drawNames = () => {
    context.fillStyle = colours.raised;
    context.fillRect(0, 0, gutter, height);
    context.fillStyle = colours.line;
    context.fillRect(gutter, 0, 1, height);
    context.fillRect(0, RULER, width, 1);
    for (const track of tracks) {
      if (track.heading) {
        context.fillStyle = colours.soft;
        context.font = "600 11px system-ui, sans-serif";
        context.fillText(clipped(track.group, gutter - 24), 12, track.top - GROUP / 2);
      }
      context.fillStyle = track.limits ? colours.warm : colours.text;
      context.font = `${track.limits ? 650 : 500} 12px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace`;
      context.fillText(clipped(track.name, gutter - 32), 20, track.top + Math.max(track.bars / 2, 7));
      if (track.deepest) {
        context.fillStyle = colours.soft;
        context.font = "10px system-ui, sans-serif";
        context.fillText(clipped(`inbox, up to ${track.deepest}`, gutter - 24), 20, track.top + track.bars + DEPTH / 2 + 2);
      }
    }
  };
  const clipped = (text, room) => {
    if (context.measureText(text).width <= room) return text;
    let kept = text;
    while (kept && context.measureText(`${kept}…`).width > room) kept = kept.slice(0, -1);
    return `${kept}…`;
  };
  const drawNow = () => {
    drawn = false;
    context.fillStyle = colours.card;
    context.fillRect(0, 0, width, height);
    drawRuler();
    context.save();
    context.beginPath();
    context.rect(gutter, RULER, width - gutter, height);
    context.clip();
    for (const track of tracks) {
      drawCurve(track);
      drawSlices(track);
    }
    drawWay();
    context.restore();
    context.textBaseline = "middle";
    drawNames();
  };
  const draw = () => {
    if (drawn || !width) return;
    drawn = true;
    requestAnimationFrame(drawNow);
  };

  const show = (begin, end) => {
    const span = Math.min(Math.max(end - begin, 200), (whole.end - whole.begin) * 1.02);
    const middle = (begin + end) / 2;
    const from = Math.min(Math.max(middle - span / 2, whole.begin - span * 0.1), whole.end - span * 0.9);
    view = { begin: from, end: from + span };
    canvas.dataset.span = String(Math.round(span));
    draw();
  };
  const zoom = (factor, at = (view.begin + view.end) / 2) =>
    show(at - (at - view.begin) * factor, at + (view.end - at) * factor);
  const move = (share) => show(view.begin + (view.end - view.begin) * share, view.end + (view.end - view.begin) * share);
  const all = () => show(whole.begin, whole.end);

  const find = (event) => {
    const box = canvas.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    if (px < gutter) return null;
    const track = tracks.find((one) => py >= one.top && py < one.top + one.bars);
    if (!track) return null;
    const lane = Math.floor((py - track.top) / track.lane);
    const slack = 2 / scale(), at = time(px);
    let best = null;
    for (let i = visible(track); i < track.slices.length && track.slices[i].begin <= at + slack; i += 1) {
      const slice = track.slices[i];
      if (slice.lane === lane && slice.end >= at - slack) best = slice;
    }
    return best && { track, slice: best };
  };
  const words = ({ track, slice }) => {
    const lines = [track.kind === "node" ? track.name : `${slice.node} on ${track.name}`];
    if (track.kind === "node") {
      if (slice.item !== null) lines.push(`item ${slice.item}`);
    } else {
      lines.push(slice.what + (slice.items ? `, ${slice.items} ${slice.items === 1 ? "item" : "items"}` : ""));
      if (slice.rows) lines.push(`${slice.rows} rows, ${slice.padding} % padding`);
    }
    lines.push(`${spoken(slice.end - slice.begin)}, from ${spoken(slice.begin)}`);
    return lines;
  };
  const follow = (frame) => {
    chosen = frame;
    const way = tracks.filter((track) => track.slices.some(follows)).map((track) => track.name);
    status.textContent = frame === null ? "" : `The item went through ${way.join(", ")}. Escape lets go of it.`;
    draw();
  };

  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    held = { at: event.clientX, view, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (held) {
      const shift = (event.clientX - held.at) / scale();
      held.moved = held.moved || Math.abs(event.clientX - held.at) > 3;
      if (held.moved) {
        canvas.classList.add("held");
        tip.hidden = true;
        show(held.view.begin - shift, held.view.end - shift);
      }
      return;
    }
    const found = find(event);
    hovered = found && found.slice;
    tip.hidden = !found;
    if (found) {
      tip.textContent = words(found).join("\n");
      tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
      tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)}px`;
    }
    draw();
  });
  const letGo = (event) => {
    canvas.classList.remove("held");
    if (held && !held.moved && event.type === "pointerup") {
      const found = find(event);
      const frames = found ? found.slice.frames : [];
      follow(frames.length ? frames[0] : null);
    }
    held = null;
  };
  canvas.addEventListener("pointerup", letGo);
  canvas.addEventListener("pointercancel", letGo);
  canvas.addEventListener("pointerleave", () => {
    tip.hidden = true;
    hovered = null;
    draw();
  });
  canvas.addEventListener("wheel", (event) => {
    const box = canvas.getBoundingClientRect();
    if (event.ctrlKey || event.metaKey) zoom(1.0015 ** event.deltaY, time(Math.max(event.clientX - box.left, gutter)));
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(event.deltaX / (width - gutter));
    else return;
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, time(event.clientX - canvas.getBoundingClientRect().left)));
  const keys = {
    ArrowLeft: () => move(-0.15), ArrowRight: () => move(0.15), "+": () => zoom(0.7), "=": () => zoom(0.7),
    "-": () => zoom(1.4), 0: all, Home: all, Escape: () => follow(null),
  };
  canvas.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    keys[event.key]();
    event.preventDefault();
  });
  const actions = { in: () => zoom(0.6), out: () => zoom(1.6), all };
  for (const button of document.querySelectorAll("[data-action]")) {
    button.addEventListener("click", actions[button.dataset.action]);
  }
  document.addEventListener("themechange", paint);
  addEventListener("beforeprint", layOut);
  new ResizeObserver(layOut).observe(canvas.parentElement);
  paint();
  layOut();
  all();
})();
