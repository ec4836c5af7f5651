// The server-sent events of the server, read by fetch so that a key can be sent in a header.

const LONGEST_PAUSE_MS = 5000;

export class Feed {
  constructor(onFrame, onState) {
    this.onFrame = onFrame;
    this.onState = onState; // (text, isBad)
    this.key = "";
  }

  headers() {
    return this.key ? { authorization: `Bearer ${this.key}` } : {};
  }

  // Follow until a recording has been read, or a key is asked for: then return "key".
  async follow() {
    let pause = 250;
    for (;;) {
      try {
        const reply = await fetch("ui/tail", { headers: this.headers(), cache: "no-store" });
        if (reply.status === 401 || reply.status === 403) return "key";
        if (!reply.ok) throw new Error(`the server replies with status ${reply.status}`);
        pause = 250;
        if (await this.read(reply.body.getReader())) return "recorded";
        this.onState("connection ended, connecting again", true);
      } catch (error) {
        this.onState(`not connected: ${error.message}`, true);
      }
      await new Promise((resume) => setTimeout(resume, pause));
      pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
    }
  }

  async read(reader) {
    const decoder = new TextDecoder();
    let text = "", isRecorded = false;
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return isRecorded;
      text += decoder.decode(value, { stream: true });
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        const event = text.slice(0, end);
        text = text.slice(end + 2);
        if (!event.startsWith("data: ")) continue;
        const frame = JSON.parse(event.slice(6));
        isRecorded ||= Boolean(frame.recorded);
        this.onFrame(frame);
      }
    }
  }

  async decision(requestId) {
    const reply = await fetch(`ui/decision?request_id=${encodeURIComponent(requestId)}`, { headers: this.headers() });
    const body = await reply.json();
    if (!reply.ok) throw new Error(body.error?.message ?? `status ${reply.status}`);
    return body;
  }
}
