// Markdown as nodes: what a model writes only ever becomes text, never HTML.

function node(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

const INLINE = /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?\S|\S)\*\*|__(?=\S)(.+?\S|\S)__|\*(?=[^\s*])(.*?[^\s*])\*(?!\*)|(?<!\w)_(?=\S)(.*?\S)_(?!\w)/s;

/** Nodes of a text with bold, italics and code in it. */
export function inline(text) {
  const nodes = [];
  while (text) {
    const found = INLINE.exec(text);
    if (!found) return [...nodes, text];
    if (found.index) nodes.push(text.slice(0, found.index));
    const [whole, , code, strong, strong2, emphasis, emphasis2] = found;
    if (code !== undefined) nodes.push(node("code", code.replace(/^ (.+) $/s, "$1")));
    else if (strong ?? strong2) nodes.push(node("strong", ...inline(strong ?? strong2)));
    else nodes.push(node("em", ...inline(emphasis ?? emphasis2)));
    text = text.slice(found.index + whole.length);
  }
  return nodes;
}

const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(.*)$/;

/** A list from the line at `start` on, and the line after it. */
function list(lines, start) {
  const [, blanks, mark] = ITEM.exec(lines[start]);
  const ordered = /\d/.test(mark), made = document.createElement(ordered ? "ol" : "ul");
  if (ordered && parseInt(mark) !== 1) made.start = parseInt(mark);
  let at = start;
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (found && found[1].length < blanks.length) break;
    if (found && found[1].length >= blanks.length + 2 && made.lastChild) {
      const [inner, after] = list(lines, at);
      made.lastChild.append(inner);
      at = after;
    } else if (found && /\d/.test(found[2]) === ordered) {
      made.append(node("li", ...inline(found[3])));
      at += 1;
    } else if (!found && /^ {2,}\S/.test(lines[at]) && made.lastChild) {
      made.lastChild.append(" ", ...inline(lines[at].trim()));
      at += 1;
    } else if (!lines[at].trim() && ITEM.test(lines[at + 1] || "")) at += 1;
    else break;
  }
  return [made, at];
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const BEGINS = [FENCE, /^#{1,6} /, ITEM, /^> ?/, /^ {0,3}([-*_])( *\1){2,} *$/];

/** A fragment with paragraphs, headings, lists, quotes and code. */
export function markdown(text) {
  const made = document.createDocumentFragment(), lines = text.split("\n");
  let at = 0;
  while (at < lines.length) {
    const line = lines[at], fence = FENCE.exec(line), heading = /^(#{1,6}) +(.*?)[ #]*$/.exec(line);
    if (!line.trim()) at += 1;
    else if (fence) {
      const held = [];
      while (++at < lines.length && lines[at].trim() !== fence[1]) held.push(lines[at]);
      made.append(node("pre", node("code", held.join("\n"))));
      at += 1;
    } else if (heading) {
      made.append(node(`h${Math.min(6, heading[1].length + 2)}`, ...inline(heading[2])));
      at += 1;
    } else if (BEGINS[4].test(line)) {
      made.append(node("hr"));
      at += 1;
    } else if (ITEM.test(line)) {
      const [found, after] = list(lines, at);
      made.append(found);
      at = after;
    } else if (/^> ?/.test(line)) {
      const held = [];
      for (; at < lines.length && /^> ?/.test(lines[at]); at++) held.push(lines[at].replace(/^> ?/, ""));
      made.append(node("blockquote", markdown(held.join("\n"))));
    } else {
      const held = [line];
      while (++at < lines.length && lines[at].trim() && !BEGINS.some(begin => begin.test(lines[at]))) held.push(lines[at]);
      made.append(node("p", ...inline(held.join("\n"))));
    }
  }
  return made;
}
