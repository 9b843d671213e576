/** A picture from the webcam: the live view in a dialog, one frame of it as a file. */

import { CallError } from "./api.js";
import { byId } from "./dom.js";

const WANTED = { video: { width: { ideal: 1280 }, height: { ideal: 960 } } };
const QUALITY = 0.92;

export function setUpWebcam({ onFile, onError }) {
  const [dialog, view] = [byId("webcam"), byId("webcam-view")];
  const open = async () => {
    dialog.showModal();
    try {
      if (!navigator.mediaDevices) throw new DOMException("", "SecurityError");
      view.srcObject = await navigator.mediaDevices.getUserMedia(WANTED);
      if (!dialog.open) release(view);
    } catch (error) {
      dialog.close();
      onError(refusalOf(error));
    }
  };
  for (const id of ["webcam-first", "webcam-open"]) byId(id).addEventListener("click", open);
  view.addEventListener("playing", () => (byId("webcam-take").disabled = false));
  dialog.addEventListener("close", () => release(view));
  byId("webcam-close").addEventListener("click", () => dialog.close());
  byId("webcam-take").addEventListener("click", async () => {
    const file = await frameOf(view);
    dialog.close();
    onFile(file);
  });
}

/** Turns the camera off. */
function release(view) {
  for (const track of view.srcObject?.getTracks() ?? []) track.stop();
  view.srcObject = null;
  byId("webcam-take").disabled = true;
}

async function frameOf(view) {
  const { videoWidth: width, videoHeight: height } = view;
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  canvas.getContext("2d").drawImage(view, 0, 0);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", QUALITY));
  return new File([blob], "webcam.jpg", { type: blob.type });
}

const REASONS = {
  NotAllowedError: ["The browser refused this page the camera.", "Allow it in the address bar, then try again."],
  NotFoundError: ["No camera was found.", "Connect one, or choose a file."],
  SecurityError: [
    "Browsers give the camera to pages over HTTPS or from this machine only.",
    "Open the page by https or on localhost, or choose a file.",
  ],
};

function refusalOf({ name, message: said }) {
  const [message, remedy] = REASONS[name] ?? [said, "Close other programs that use the camera, then try again."];
  return new CallError({ title: "There is no picture from the camera", message, remedy });
}
