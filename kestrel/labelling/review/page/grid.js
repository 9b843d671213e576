/* Tiles of equal size. Only those near the window exist, so that thousands scroll as a few do. */

const LEAST_WIDTH = 230;
const GAP = 14;
const FOOT_HEIGHT = 82;

class Grid {
  constructor(box, { makeTile }) {
    this.box = box;
    this.makeTile = makeTile;
    this.items = [];
    this.places = new Map();
    /** picture -> {node, fill} */
    this.tiles = new Map();
    this.current = null;
    let isWaiting = false;
    const later = () => {
      if (isWaiting) return;
      isWaiting = true;
      requestAnimationFrame(() => {
        isWaiting = false;
        this.render();
      });
    };
    addEventListener("scroll", later, { passive: true });
    new ResizeObserver(() => this.measure()).observe(box);
  }

  show(items) {
    this.items = items;
    this.places = new Map(items.map((picture, index) => [picture, index]));
    for (const tile of this.tiles.values()) tile.node.remove();
    this.tiles.clear();
    this.width = 0;
    this.measure();
  }

  measure() {
    const width = this.box.clientWidth;
    if (width === this.width || width === 0) return;
    this.width = width;
    this.columns = Math.max(1, Math.floor((width + GAP) / (LEAST_WIDTH + GAP)));
    this.tileWidth = (width - GAP * (this.columns - 1)) / this.columns;
    this.tileHeight = Math.round(this.tileWidth * 0.72) + FOOT_HEIGHT;
    const rows = Math.ceil(this.items.length / this.columns);
    this.box.style.height = `${Math.max(0, rows * (this.tileHeight + GAP) - GAP)}px`;
    for (const [picture, { node }] of this.tiles) this.place(node, this.places.get(picture));
    this.render();
  }

  place(node, index) {
    const step = this.tileHeight + GAP;
    node.style.width = `${this.tileWidth}px`;
    node.style.height = `${this.tileHeight}px`;
    node.style.left = `${(index % this.columns) * (this.tileWidth + GAP)}px`;
    node.style.top = `${Math.floor(index / this.columns) * step}px`;
  }

  /** Makes the tiles near the window and removes the others, but never the current one: it may have the focus. */
  render() {
    if (!this.width) return;
    const top = -this.box.getBoundingClientRect().top;
    const step = this.tileHeight + GAP;
    const first = Math.max(0, Math.floor((top - innerHeight / 2) / step)) * this.columns;
    const end = Math.max(0, Math.ceil((top + innerHeight * 1.5) / step)) * this.columns;
    const wanted = new Set(this.items.slice(first, end));
    if (this.places.has(this.current)) wanted.add(this.current);
    for (const [picture, { node }] of this.tiles) {
      if (wanted.has(picture)) continue;
      node.remove();
      this.tiles.delete(picture);
    }
    for (const picture of wanted) if (!this.tiles.has(picture)) this.add(picture);
  }

  add(picture) {
    const tile = this.makeTile(picture, this.places.get(picture), this.items.length);
    this.place(tile.node, this.places.get(picture));
    this.tiles.set(picture, tile);
    this.box.append(tile.node);
    tile.fill();
  }

  fill(picture) {
    this.tiles.get(picture)?.fill();
  }

  /** In view, below what sticks to the top. */
  reveal(picture) {
    this.render();
    this.tiles.get(picture)?.node.scrollIntoView({ block: "nearest" });
  }
}
