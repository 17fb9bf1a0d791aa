// Lets the search work where the site is opened from the disk. Browsers start no worker from a file: URL, so this one runs in
// a hidden frame with the messages of a worker. The theme looks for this name.
class IFrameWorker extends EventTarget {
  constructor(url) {
    super()
    const frame = document.createElement("iframe")
    frame.hidden = true
    document.body.appendChild(frame)
    const inside = frame.contentWindow
    inside.document.open()
    // The theme's worker sends its answers by postMessage, and loads no further scripts for English.
    inside.document.write(
      `<script>postMessage = message => parent.postMessage({search: message}, "*")<\/script><script src="${url}"><\/script>`
    )
    inside.document.close()
    this.ready = new Promise(resolve => inside.addEventListener("load", resolve))
    this.inside = inside
    addEventListener("message", event => {
      if (event.source === inside) this.dispatchEvent(new MessageEvent("message", {data: event.data.search}))
    })
  }

  postMessage(data) {
    this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", {data})))
  }
}

if (location.protocol === "file:") window.Worker = IFrameWorker
