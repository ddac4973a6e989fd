//! The live picture behind the dashboard: `GET /v1/events`, as server-sent events.
//!
//! One sampler looks for all pages that are open, and only while one is. It looks when a commit rings a bell and
//! once a second anyway, never more than four times a second, and rests ten times as long as its last look took: a
//! slow database is not asked more often. A page gets the whole picture first, so that a reconnect needs no memory,
//! and from then on the sections that changed. A page that reads slowly skips pictures; it never queues them.
//!
//! Streams end when shutdown begins, and so never hold it up. While the database is away the last picture stands,
//! but for the sections that can tell of it.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderName;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::future::{BoxFuture, select_all};
use futures_util::{FutureExt, StreamExt, stream};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::caller::{Caller, Identity};
use super::extract::Params;
use super::problem::Problem;
use crate::access::Keys;
use stockade_kernel::db::Bell;

/// Looks are never closer together than this: four frames a second at most.
const LOOKS_APART: Duration = Duration::from_millis(250);
/// How often to look though no bell rings.
const LOOK_ANYWAY: Duration = Duration::from_secs(1);
/// A look that takes longer than this finds nothing.
const LOOK_TIMEOUT: Duration = Duration::from_secs(2);
/// For each unit of time spent looking, this many are spent at rest.
const REST_PER_LOOK: u32 = 10;
/// A comment this often, so that nothing between us and the page takes the silence for death.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How long a page waits before it connects again.
const RETRY_AFTER: Duration = Duration::from_secs(2);

type Looked = BoxFuture<'static, anyhow::Result<Box<RawValue>>>;

/// A part of the picture: its name, and how to look.
pub struct Section {
    name: &'static str,
    /// Looked at no more often than this.
    apart: Duration,
    audience: Audience,
    view: View,
}

/// Who sees a section.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Audience {
    Everyone,
    /// Callers of no one tenant: what counts every tenant's messages is for them.
    Platform,
    /// The others.
    Tenants,
}

/// A tenant's pages, or those that also see what belongs to none.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Room {
    group_id: String,
    platform: bool,
}

impl Room {
    fn sees(&self, section: &Section) -> bool {
        match section.audience {
            Audience::Everyone => true,
            Audience::Platform => self.platform,
            Audience::Tenants => !self.platform,
        }
    }
}

enum View {
    /// The same for all who see it.
    Shared(Box<dyn Fn() -> Looked + Send + Sync>),
    /// What one tenant may see, by its group.
    OfGroup(Box<dyn Fn(String) -> Looked + Send + Sync>),
}

impl Section {
    /// What is for callers of no one tenant.
    pub fn shared<T: Serialize + 'static, F>(name: &'static str, look: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<T, Problem>> + Send + 'static,
    {
        let view = View::Shared(Box::new(move || Box::pin(write(look()))));
        Self { name, apart: Duration::ZERO, audience: Audience::Platform, view }
    }

    /// Shown to tenants instead of what the platform sees under the same name.
    #[must_use]
    pub fn for_tenants(self) -> Self {
        Self { audience: Audience::Tenants, ..self }
    }

    pub fn of_group<T: Serialize + 'static, F>(
        name: &'static str,
        look: impl Fn(String) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Result<T, Problem>> + Send + 'static,
    {
        let look = move |group| -> Looked { Box::pin(write(look(group))) };
        Self { name, apart: Duration::ZERO, audience: Audience::Everyone, view: View::OfGroup(Box::new(look)) }
    }

    /// For what is costly to look at.
    #[must_use]
    pub fn no_closer_than(self, apart: Duration) -> Self {
        Self { apart, ..self }
    }
}

async fn write<T: Serialize>(look: impl Future<Output = Result<T, Problem>>) -> anyhow::Result<Box<RawValue>> {
    let seen = look.await.map_err(|problem| anyhow::anyhow!(problem.detail))?;
    Ok(serde_json::value::to_raw_value(&seen)?)
}

/// A section as last seen, and the number of the change that made it so.
#[derive(Clone)]
struct Seen {
    change: u64,
    text: Arc<RawValue>,
}

/// Everything as one tenant last saw it.
#[derive(Clone, Default)]
struct Picture {
    /// The latest change in it; 0 before the first look.
    change: u64,
    sections: BTreeMap<&'static str, Seen>,
}

impl Picture {
    /// The sections that changed after `since`, as a frame: all of them after 0.
    fn frame(&self, since: u64) -> Event {
        let news: BTreeMap<&str, &RawValue> = self
            .sections
            .iter()
            .filter(|(_, seen)| seen.change > since)
            .map(|(name, seen)| (*name, &*seen.text))
            .collect();
        let text = serde_json::to_string(&news).expect("a map of names to JSON is JSON");
        let kind = if since == 0 { "snapshot" } else { "delta" };
        Event::default().event(kind).id(self.change.to_string()).retry(RETRY_AFTER).data(text)
    }
}

#[derive(Clone)]
pub struct Live {
    inner: Arc<Inner>,
}

struct Inner {
    /// Where pages watch. A room without pages is closed at the next look.
    rooms: Mutex<BTreeMap<Room, watch::Sender<Arc<Picture>>>>,
    opened: Notify,
    places: Arc<Semaphore>,
    keys: Keys,
    places_max: usize,
    draining: CancellationToken,
}

/// The one that looks.
pub struct Sampler {
    live: Live,
    sections: Vec<Section>,
    bells: Vec<Bell>,
    changes: u64,
    /// By section, who sees it and, for what only one tenant may see, its group.
    taken: HashMap<(&'static str, Audience, String), (Instant, Seen)>,
}

impl Live {
    /// How many pages watch.
    pub fn streams(&self) -> usize {
        self.inner.places_max - self.inner.places.available_permits()
    }

    /// `streams_max`: pages beyond that are told to poll. `keys`: a stream ends when what let it in is no longer good.
    /// `draining`: cancelled when shutdown begins.
    pub fn new(streams_max: usize, keys: Keys, draining: CancellationToken) -> Self {
        Self {
            inner: Arc::new(Inner {
                rooms: Mutex::default(),
                opened: Notify::new(),
                places: Arc::new(Semaphore::new(streams_max)),
                keys,
                places_max: streams_max,
                draining,
            }),
        }
    }

    pub fn sampler(&self, sections: Vec<Section>, bells: Vec<Bell>) -> Sampler {
        Sampler { live: self.clone(), sections, bells, changes: 0, taken: HashMap::new() }
    }

    fn enter(&self, room: Room) -> watch::Receiver<Arc<Picture>> {
        let mut rooms = self.inner.rooms.lock().unwrap_or_else(PoisonError::into_inner);
        let room = rooms.entry(room).or_insert_with(|| {
            self.inner.opened.notify_one();
            watch::Sender::default()
        });
        room.subscribe()
    }

    /// The rooms that somebody is in; the others are closed.
    fn watched(&self) -> Vec<Room> {
        let mut rooms = self.inner.rooms.lock().unwrap_or_else(PoisonError::into_inner);
        rooms.retain(|_, room| room.receiver_count() > 0);
        rooms.keys().cloned().collect()
    }

    /// Shows a picture if it is news; says whether it was.
    fn show(&self, room: &Room, picture: Picture) -> bool {
        let rooms = self.inner.rooms.lock().unwrap_or_else(PoisonError::into_inner);
        rooms.get(room).is_some_and(|room| {
            room.send_if_modified(|shown| {
                let news = picture.change > shown.change;
                if news {
                    *shown = Arc::new(picture);
                }
                news
            })
        })
    }
}

impl Sampler {
    pub async fn run(mut self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            let rooms = self.live.watched();
            if rooms.is_empty() {
                self.taken.clear();
                tokio::select! { () = self.live.inner.opened.notified() => {} () = stop.cancelled() => {} }
                continue;
            }
            let started = Instant::now();
            self.look(&rooms, started).await;
            let apart = LOOKS_APART.max(started.elapsed() * REST_PER_LOOK);
            tokio::select! {
                () = tokio::time::sleep_until(started + apart) => {}
                () = self.live.inner.opened.notified() => continue,
                () = stop.cancelled() => {}
            }
            let rung = select_all(self.bells.iter_mut().map(|bell| bell.rung().boxed()));
            tokio::select! {
                _ = rung => {}
                () = tokio::time::sleep_until(started + LOOK_ANYWAY.max(apart)) => {}
                () = self.live.inner.opened.notified() => {}
                () = stop.cancelled() => {}
            }
        }
    }

    /// Looks for each room, and shows what is new.
    async fn look(&mut self, rooms: &[Room], started: Instant) {
        for bell in &mut self.bells {
            bell.hush(); // what rings from here on is for the next look
        }
        let is_watched = |group: &String| group.is_empty() || rooms.iter().any(|room| room.group_id == *group);
        self.taken.retain(|(.., group), _| is_watched(group));
        for room in rooms {
            let mut picture = Picture::default();
            for section in self.sections.iter().filter(|section| room.sees(section)) {
                let group = match section.view {
                    View::Shared(_) => String::new(),
                    View::OfGroup(_) => room.group_id.clone(),
                };
                let key = (section.name, section.audience, group);
                let before = self.taken.get(&key);
                let still_good = before.is_some_and(|(at, _)| *at >= started || at.elapsed() < section.apart);
                if !still_good && let Some(text) = section.look(&room.group_id).await {
                    let change = match before {
                        Some((_, seen)) if seen.text.get() == text.get() => seen.change,
                        _ => {
                            self.changes += 1;
                            self.changes
                        }
                    };
                    self.taken.insert(key.clone(), (Instant::now(), Seen { change, text: text.into() }));
                }
                if let Some((_, seen)) = self.taken.get(&key) {
                    picture.change = picture.change.max(seen.change);
                    picture.sections.insert(section.name, seen.clone());
                }
            }
            self.live.show(room, picture);
        }
    }
}

impl Section {
    /// `None` if it cannot be seen just now: then what was last seen stands.
    async fn look(&self, group: &str) -> Option<Box<RawValue>> {
        let look = match &self.view {
            View::Shared(look) => look(),
            View::OfGroup(look) => look(group.to_owned()),
        };
        match tokio::time::timeout(LOOK_TIMEOUT, look).await {
            Ok(Ok(text)) => Some(text),
            Ok(Err(error)) => {
                tracing::debug!(section = self.name, %error, "cannot be looked at");
                None
            }
            Err(_) => None,
        }
    }
}

pub fn routes() -> OpenApiRouter<Live> {
    OpenApiRouter::new().routes(routes!(stream_events))
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StreamEvents {
    /// End after the first frame: for pages that poll.
    #[serde(default)]
    once: bool,
}

/// Watch everything, as server-sent events: a `snapshot` of all sections, then a `delta` of those that changed.
///
/// Each frame is a JSON object of sections by name, whole each. A client that lost the stream connects again and
/// gets a snapshot. At most four frames a second.
#[utoipa::path(get, path = "/v1/events", tag = "operations", security(("key" = ["viewer"])), params(StreamEvents), responses(
    (status = 200, body = String, content_type = "text/event-stream"),
    (status = 400, body = Problem, content_type = "application/problem+json"),
    (status = 503, description = "Too many streams, or shutting down", body = Problem, content_type = "application/problem+json"),
))]
async fn stream_events(
    State(live): State<Live>,
    caller: Caller,
    Params(params): Params<StreamEvents>,
) -> Result<Response, Problem> {
    if live.inner.draining.is_cancelled() {
        return Err(Problem::new(503, "draining", "this instance is shutting down").retry_after(5));
    }
    let place = live.inner.places.clone().try_acquire_owned().map_err(|_| {
        let detail = "as many pages are open as this server serves; ask with ?once=true instead";
        Problem::new(503, "too-many-streams", detail).retry_after(5)
    });
    // Whoever polls takes no place for longer than a look.
    let place = if params.once { place.ok() } else { Some(place?) };
    let identity = caller.identity;
    let room = Room { group_id: caller.group_id, platform: identity.platform };
    let page = Watching { picture: live.enter(room), seen: 0, identity, keys: live.inner.keys.clone(), _place: place };
    let frames = stream::unfold(page, Watching::next).take(if params.once { 1 } else { usize::MAX });
    let frames = frames.take_until(live.inner.draining.clone().cancelled_owned());
    let stream = Sse::new(frames).keep_alive(KeepAlive::new().interval(KEEP_ALIVE));
    // Proxies that gather answers before they pass them on are asked not to.
    Ok(([(HeaderName::from_static("x-accel-buffering"), "no")], stream).into_response())
}

/// One page's place at the window.
struct Watching {
    picture: watch::Receiver<Arc<Picture>>,
    seen: u64,
    identity: Identity,
    keys: Keys,
    _place: Option<OwnedSemaphorePermit>,
}

impl Watching {
    /// Ends when there is nobody left to draw, or when what let the page in is no longer good.
    async fn next(mut self) -> Option<(Result<Event, Infallible>, Self)> {
        let seen = self.seen;
        let picture = self.picture.wait_for(|picture| picture.change > seen).await.ok()?.clone();
        if !self.identity.is_good(&self.keys) {
            return None;
        }
        self.seen = picture.change;
        Some((Ok(picture.frame(seen)), self))
    }
}
