//! The live stream: a snapshot, then what changed; not too often, not too many, and never in the way of a shutdown.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use reqwest::Response;
use serde_json::{Value, json};

use crate::support::{App, DEADLINE, TestDb, each_database, problem};

each_database!(
    where_nothing_happens_nothing_is_sent,
    a_page_gets_a_snapshot_and_then_what_changed,
    a_busy_server_sends_at_most_four_frames_a_second,
    too_many_pages_are_told_to_poll,
    open_pages_do_not_delay_a_shutdown,
);

/// A stream, read frame by frame.
struct Stream {
    response: Response,
    text: String,
}

#[derive(Debug)]
struct Frame {
    kind: String,
    id: u64,
    sections: BTreeMap<String, Value>,
}

impl Stream {
    async fn open(app: &App, path: &str) -> Self {
        let response = app.get(path).send().await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        assert_eq!(response.headers()["x-accel-buffering"], "no");
        Self { response, text: String::new() }
    }

    /// The next frame; `None` at the end of the stream.
    async fn next(&mut self) -> Option<Frame> {
        loop {
            if let Some((frame, rest)) = self.text.split_once("\n\n") {
                let fields: BTreeMap<String, String> = frame
                    .lines()
                    .filter_map(|line| line.split_once(':'))
                    .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
                    .collect();
                self.text = rest.to_owned();
                if let Some(data) = fields.get("data") {
                    return Some(Frame {
                        kind: fields["event"].clone(),
                        id: fields["id"].parse().unwrap(),
                        sections: serde_json::from_str(data).unwrap(),
                    });
                }
            }
            let read = tokio::time::timeout(DEADLINE, self.response.chunk()).await.expect("a frame in time");
            self.text.push_str(std::str::from_utf8(&read.unwrap()?).unwrap());
        }
    }

    /// Reads on until a section looks as it should.
    async fn until(&mut self, section: &str, looks: impl Fn(&Value) -> bool) -> Frame {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let frame = self.next().await.expect("the stream goes on");
            if frame.sections.get(section).is_some_and(&looks) {
                return frame;
            }
            assert!(Instant::now() < deadline, "{section} never looked as it should");
        }
    }
}

async fn a_page_gets_a_snapshot_and_then_what_changed(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("WIDGET-A", 100).await;
    let mut stream = Stream::open(&app, "/v1/events").await;
    let first = stream.next().await.unwrap();
    assert_eq!(first.kind, "snapshot");
    let names: Vec<&str> = first.sections.keys().map(String::as_str).collect();
    for name in ["audit", "inbox", "orders", "queues", "reservations", "server"] {
        assert!(names.contains(&name), "{names:?}");
    }
    assert_eq!(first.sections["server"]["demo"], true);
    assert!(first.sections["queues"].as_array().unwrap().len() >= 3);

    let order = app.place("alice", &[("WIDGET-A", 2)]).await;
    let held = stream
        .until("reservations", |rows| rows.as_array().unwrap().iter().any(|row| row["order_id"] == order["id"]))
        .await;
    assert_eq!(held.kind, "delta");
    assert!(held.id > first.id);
    assert_eq!(held.sections["reservations"][0]["lines"], json!([{ "sku": "WIDGET-A", "quantity": 2 }]));

    // A stream that broke is opened anew and begins with everything again.
    let mut again = Stream::open(&app, "/v1/events").await;
    let snapshot = again.next().await.unwrap();
    assert_eq!(snapshot.kind, "snapshot");
    assert_eq!(snapshot.sections.len(), first.sections.len());
    assert_eq!(snapshot.sections["orders"]["data"][0]["id"], order["id"]);
    assert_eq!(snapshot.sections["orders"]["placed_last_minute"], 1);

    // An audit that somebody asks for is everybody's news.
    let audit = app.read("/v1/audit").await;
    again.until("audit", |seen| seen["checked_at"] == audit["checked_at"] && seen["violations"] == 0).await;

    app.tell("/v1/consumers/inventory/pause", &json!({})).await;
    again
        .until("queues", |rows| {
            let paused = |row: &&Value| row["paused"] == true;
            let names: Vec<&Value> = rows.as_array().unwrap().iter().filter(paused).map(|row| &row["name"]).collect();
            names == ["stockade.inventory"]
        })
        .await;
    drop((stream, again));
    app.stop().await;
}

async fn a_busy_server_sends_at_most_four_frames_a_second(db: TestDb) {
    let app = App::start(&db).await;
    app.put_stock("WIDGET-A", 10_000).await;
    // The sampler starts with the first page, so every frame was made after this.
    let start = Instant::now();
    let mut stream = Stream::open(&app, "/v1/events").await;
    stream.next().await.unwrap();
    let mut frames = 0;
    // A slow database is looked at less often, so two frames may take a while.
    while start.elapsed() < Duration::from_secs(3) || (frames < 2 && start.elapsed() < DEADLINE) {
        app.place("alice", &[("WIDGET-A", 1)]).await;
        app.place("bob", &[("WIDGET-A", 1)]).await;
        // Takes what has come, without waiting for more.
        while tokio::time::timeout(Duration::from_millis(20), stream.next()).await.is_ok() {
            frames += 1;
        }
    }
    // However late a frame arrives: one look each 250 ms, the snapshot not counted.
    let most = start.elapsed().as_millis() / 250 + 1;
    assert!(frames <= most, "{frames} frames in {:?}", start.elapsed());
    assert!(frames >= 2, "{frames} frames though orders kept coming");
    drop(stream);
    app.stop().await;
}

/// What a server at rest writes to its pages is what they cost it.
async fn where_nothing_happens_nothing_is_sent(db: TestDb) {
    let app = App::start(&db).await;
    let mut stream = Stream::open(&app, "/v1/events").await;
    stream.until("audit", |audit| !audit.is_null()).await;
    // The loops come to rest, and then only their hearts beat.
    let mut quiet = Instant::now();
    let deadline = Instant::now() + DEADLINE;
    while quiet.elapsed() < Duration::from_secs(3) {
        if let Ok(frame) = tokio::time::timeout(Duration::from_millis(500), stream.next()).await {
            assert!(Instant::now() < deadline, "it never comes to rest: {frame:?}");
            quiet = Instant::now();
        }
    }
    drop(stream);
    app.stop().await;
}

async fn too_many_pages_are_told_to_poll(db: TestDb) {
    let app = App::start_with(&db, &["--sse-max-streams", "2"]).await;
    let mut first = Stream::open(&app, "/v1/events").await;
    let second = Stream::open(&app, "/v1/events").await;
    problem(app.get("/v1/events").send().await.unwrap(), 503, "too-many-streams").await;
    let mut polled = Stream::open(&app, "/v1/events?once=true").await;
    assert_eq!(polled.next().await.unwrap().kind, "snapshot");
    assert!(polled.next().await.is_none(), "one frame, and that was it");
    assert_eq!(first.next().await.unwrap().kind, "snapshot");
    drop(second);
    crate::support::eventually("the place of a page that left", || async {
        (app.get("/v1/events").send().await.unwrap().status() == 200).then_some(())
    })
    .await;
    drop(first);
    app.stop().await;
}

async fn open_pages_do_not_delay_a_shutdown(db: TestDb) {
    // Streams that held up the shutdown would do so for an hour.
    let app = App::start_with(&db, &["--shutdown-drain", "1h"]).await;
    let mut streams = Vec::new();
    for _ in 0..20 {
        let mut stream = Stream::open(&app, "/v1/events").await;
        stream.next().await.unwrap();
        streams.push(stream);
    }
    tokio::time::timeout(DEADLINE, app.stop()).await.expect("a shutdown with pages open");
    for mut stream in streams {
        while stream.next().await.is_some() {}
    }
}
