/** Messages across the page: what went wrong, what to do about it, and the id to name when asking for help. */

import { byId, element } from "./dom.js";
import { copyText } from "./clipboard.js";

/** `action` is an optional [title, function] offered as a button. */
export function showError(error, action = null) {
  const banner = element(
    "div",
    { className: "banner" },
    element(
      "div",
      { className: "banner-text" },
      element("strong", {}, error.title ?? "Something went wrong"),
      element("p", {}, error.message),
      ...(error.remedy ? [element("p", { className: "remedy" }, error.remedy)] : []),
      ...(error.requestId ? [requestIdOf(error.requestId)] : []),
    ),
  );
  if (action) {
    const [title, act] = action;
    const button = element("button", { type: "button", className: "banner-action" }, title);
    button.addEventListener("click", () => act());
    banner.append(button);
  }
  banner.append(closeButton(banner));
  byId("banners").replaceChildren(banner);
  banner.scrollIntoView({ block: "nearest" });
}

/** Something to know that is no failure. */
export function showNotice(text) {
  const banner = element(
    "div",
    { className: "banner is-notice" },
    element("div", { className: "banner-text" }, element("p", {}, text)),
  );
  banner.append(closeButton(banner));
  byId("banners").replaceChildren(banner);
}

export const clearBanners = () => byId("banners").replaceChildren();

function requestIdOf(requestId) {
  const button = element(
    "button",
    { type: "button", className: "request-id", title: "Copy the request id" },
    `request ${requestId}`,
  );
  button.addEventListener("click", () => copyText(requestId, button));
  return button;
}

function closeButton(banner) {
  const close = element("button", { type: "button", className: "banner-close", "aria-label": "Dismiss" }, "×");
  close.addEventListener("click", () => banner.remove());
  return close;
}
