//! One TCP connection to one shard: pipelined requests, answers in order.
//!
//! A task writes what is queued, in one piece when much is; another reads. Answers come in the order of the
//! requests, so the waiting ones are a queue. When the connection ends, every waiting request is answered with
//! [`ClientError::Disconnected`]; nothing is ever sent again on it.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::net::{Shutdown, SocketAddr, ToSocketAddrs};
use std::rc::Rc;

use ringfence_engine::types::ShardId;
use tokio::sync::{Notify, oneshot};
use tokio_uring::buf::BoundedBuf;
use tokio_uring::net::TcpStream;

use super::{Bytes, ClientConfig, ClientError};
use crate::native::{
    Acks, Api, ClusterId, Frame, Header, HelloAnswer, HelloRequest, Request, Response, Role,
};

/// Bytes asked of the socket at once while small answers come in.
const READ_CHUNK: usize = 64 << 10;

/// Called once with the answer, or with the reason why there is none.
pub(super) type OnAnswer = Box<dyn FnOnce(Result<Response<Bytes>, ClientError>)>;

/// A connection; dropping it closes the socket.
pub struct Connection {
    link: Rc<Link>,
    hello: HelloAnswer,
}

struct Waiting {
    correlation: u64,
    api: Api,
    done: OnAnswer,
}

/// What the connection shares with its two tasks.
struct Link {
    address: String,
    stream: TcpStream,
    max_frame: usize,
    /// Frames not handed to the kernel yet.
    outgoing: RefCell<Vec<u8>>,
    written: Notify,
    waiting: RefCell<VecDeque<Waiting>>,
    next_correlation: Cell<u64>,
    ended: RefCell<Option<ClientError>>,
}

impl Connection {
    /// Connects to `address`, says Hello, and asks to be served by `shard`.
    pub async fn open(
        address: &str,
        shard: Option<ShardId>,
        config: &ClientConfig,
    ) -> Result<Connection, ClientError> {
        let failed = |cause: String| ClientError::Connect {
            address: address.to_owned(),
            cause,
        };
        match tokio::time::timeout(config.connect_timeout, Self::establish(address, shard, config)).await {
            Ok(Err(ClientError::Disconnected { cause, .. })) => Err(failed(cause)),
            Ok(result) => result,
            Err(_) => Err(failed(format!("no answer within {:?}", config.connect_timeout))),
        }
    }

    async fn establish(
        address: &str,
        shard: Option<ShardId>,
        config: &ClientConfig,
    ) -> Result<Connection, ClientError> {
        let stream = dial(address).await?;
        // Small requests leave at once; batching is done here, not by the kernel.
        stream.set_nodelay(true).map_err(|error| ClientError::Connect {
            address: address.to_owned(),
            cause: error.to_string(),
        })?;
        let link = Rc::new(Link {
            address: address.to_owned(),
            stream,
            max_frame: config.max_frame,
            outgoing: RefCell::default(),
            written: Notify::new(),
            waiting: RefCell::default(),
            next_correlation: Cell::new(1),
            ended: RefCell::default(),
        });
        // From here on the guard closes the socket when this future is dropped, so that both tasks end.
        let mut connection = Connection {
            hello: HelloAnswer::nobody(),
            link,
        };
        tokio_uring::spawn(write_loop(Rc::clone(&connection.link)));
        tokio_uring::spawn(read_loop(Rc::clone(&connection.link)));
        let hello = Request::Hello(HelloRequest {
            role: Role::Client,
            cluster: ClusterId::default(),
            node: None,
            generation: 0,
            shard,
            software: config.software.clone(),
        });
        match connection.request(&hello).await? {
            Response::Hello(answer) => connection.hello = answer,
            other => return Err(connection.unexpected(&other)),
        }
        Ok(connection)
    }

    /// Who answered.
    #[must_use]
    pub fn hello(&self) -> &HelloAnswer {
        &self.hello
    }

    /// Where it leads.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.link.address
    }

    /// Whether requests can still be sent.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.link.ended.borrow().is_none()
    }

    /// Sends a request and waits for its answer. A refusal is an error.
    pub async fn request(&self, request: &Request<Bytes>) -> Result<Response<Bytes>, ClientError> {
        let (sender, receiver) = oneshot::channel();
        self.send(
            request,
            Box::new(move |answer| {
                // The asker may have lost interest; that is its right.
                let _ = sender.send(answer);
            }),
        );
        match receiver.await {
            Ok(Ok(Response::Refused(refusal))) => Err(refusal.into()),
            Ok(answer) => answer,
            Err(_) => Err(self.link.ended_error()),
        }
    }

    /// Queues a request; `done` is called with its answer. A Produce with acks 0 has none: use
    /// [`Connection::send_unanswered`].
    pub(super) fn send(&self, request: &Request<Bytes>, done: OnAnswer) {
        debug_assert!(!matches!(request, Request::Produce(produce) if produce.acks == Acks::None));
        if !self.is_open() {
            done(Err(self.link.ended_error()));
            return;
        }
        let correlation = self.link.queue(request);
        self.link.waiting.borrow_mut().push_back(Waiting {
            correlation,
            api: request.api(),
            done,
        });
    }

    /// Queues a request that has no answer.
    pub(super) fn send_unanswered(&self, request: &Request<Bytes>) -> Result<(), ClientError> {
        if !self.is_open() {
            return Err(self.link.ended_error());
        }
        self.link.queue(request);
        Ok(())
    }

    /// The error for an answer of another kind than asked for.
    pub(super) fn unexpected(&self, answer: &Response<Bytes>) -> ClientError {
        match answer {
            Response::Refused(refusal) => refusal.clone().into(),
            _ => ClientError::Protocol {
                address: self.link.address.clone(),
                cause: "the answer is of another kind than the request".to_owned(),
            },
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.link.end("closed here".to_owned());
    }
}

impl Link {
    fn queue(&self, request: &Request<Bytes>) -> u64 {
        let correlation = self.next_correlation.get();
        self.next_correlation.set(correlation + 1);
        let encoded = request.encode(correlation);
        let mut outgoing = self.outgoing.borrow_mut();
        outgoing.reserve(encoded.frame_len());
        outgoing.extend_from_slice(&encoded.head);
        for records in &encoded.tail {
            outgoing.extend_from_slice(records);
        }
        self.written.notify_one();
        correlation
    }

    fn ended_error(&self) -> ClientError {
        let ended = self.ended.borrow();
        ended
            .clone()
            .unwrap_or_else(|| self.disconnected("closed here".to_owned()))
    }

    fn disconnected(&self, cause: String) -> ClientError {
        ClientError::Disconnected {
            address: self.address.clone(),
            cause,
        }
    }

    fn end(&self, cause: String) {
        let error = self.disconnected(cause);
        self.end_with(error);
    }

    /// Ends the connection once; answers everything that waits.
    fn end_with(&self, error: ClientError) {
        if self.ended.borrow().is_some() {
            return;
        }
        *self.ended.borrow_mut() = Some(error.clone());
        // Fails when the peer has reset the connection already; there is nothing left to shut down then.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.written.notify_one();
        let waiting = std::mem::take(&mut *self.waiting.borrow_mut());
        for request in waiting {
            (request.done)(Err(error.clone()));
        }
    }

    /// Hands one whole frame to the request it answers.
    fn answer(&self, bytes: Vec<u8>) -> Result<(), ClientError> {
        let protocol = |cause: &str| ClientError::Protocol {
            address: self.address.clone(),
            cause: cause.to_owned(),
        };
        let frame = Frame::open(Bytes::from(bytes), self.max_frame)
            .map_err(|error| ClientError::framing(&self.address, &error))?;
        let request = self.waiting.borrow_mut().pop_front();
        let request = request.ok_or_else(|| protocol("an answer without a request"))?;
        let decoded = if request.correlation == frame.header.correlation {
            Response::decode(request.api, &frame).map_err(|error| ClientError::layout(&self.address, &error))
        } else {
            Err(protocol("answers are out of order"))
        };
        let failed = decoded.as_ref().err().cloned();
        (request.done)(decoded);
        failed.map_or(Ok(()), Err)
    }
}

async fn dial(address: &str) -> Result<TcpStream, ClientError> {
    let resolve = |cause: String| ClientError::Resolve {
        address: address.to_owned(),
        cause,
    };
    // Blocks this thread while the resolver works; literal addresses and hosts-file names return at once.
    let targets: Vec<SocketAddr> = address
        .to_socket_addrs()
        .map_err(|error| resolve(error.to_string()))?
        .collect();
    let mut cause = None;
    for target in targets {
        match TcpStream::connect(target).await {
            Ok(stream) => return Ok(stream),
            Err(error) => cause = Some(error),
        }
    }
    Err(match cause {
        Some(error) => ClientError::Connect {
            address: address.to_owned(),
            cause: error.to_string(),
        },
        None => resolve("the name has no address".to_owned()),
    })
}

async fn write_loop(link: Rc<Link>) {
    let mut spare = Vec::new();
    loop {
        if link.ended.borrow().is_some() {
            return;
        }
        let ready = std::mem::replace(&mut *link.outgoing.borrow_mut(), spare);
        if ready.is_empty() {
            spare = ready;
            link.written.notified().await;
            continue;
        }
        let (result, mut written) = link.stream.write_all(ready).await;
        if let Err(error) = result {
            link.end(error.to_string());
            return;
        }
        written.clear();
        // One large burst must not pin its memory for the life of the connection.
        written.shrink_to(4 << 20);
        spare = written;
    }
}

async fn read_loop(link: Rc<Link>) {
    let error = match read_frames(&link).await {
        Ok(()) => link.disconnected("the broker closed it".to_owned()),
        Err(error) => error,
    };
    link.end_with(error);
}

/// Reads frames until the peer closes. Small ones are cut out of a shared chunk, the rest of a large one is read
/// straight into memory of its own.
async fn read_frames(link: &Link) -> Result<(), ClientError> {
    let mut chunk = Vec::with_capacity(READ_CHUNK);
    let mut filled = 0;
    loop {
        let (count, back) = read_some(link, chunk, filled, READ_CHUNK).await?;
        chunk = back;
        if count == 0 {
            return Ok(());
        }
        filled += count;
        let mut at = 0;
        while let Some(header) = Header::peek(&chunk[at..filled], link.max_frame)
            .map_err(|error| ClientError::framing(&link.address, &error))?
        {
            let len = header.frame_len();
            let have = len.min(filled - at);
            if have < len && len <= READ_CHUNK {
                break;
            }
            let mut frame = Vec::with_capacity(len);
            frame.extend_from_slice(&chunk[at..at + have]);
            at += have;
            let frame = read_rest(link, frame, len).await?;
            link.answer(frame)?;
        }
        chunk.copy_within(at..filled, 0);
        filled -= at;
    }
}

async fn read_rest(link: &Link, mut frame: Vec<u8>, len: usize) -> Result<Vec<u8>, ClientError> {
    while frame.len() < len {
        let filled = frame.len();
        let (count, back) = read_some(link, frame, filled, len).await?;
        frame = back;
        if count == 0 {
            return Err(link.disconnected("the broker closed it inside an answer".to_owned()));
        }
    }
    Ok(frame)
}

/// Reads into `buf[from..to]`; returns the count and the buffer.
async fn read_some(
    link: &Link,
    buf: Vec<u8>,
    from: usize,
    to: usize,
) -> Result<(usize, Vec<u8>), ClientError> {
    let (result, slice) = link.stream.read(buf.slice(from..to)).await;
    let count = result.map_err(|error| link.disconnected(error.to_string()))?;
    Ok((count, slice.into_inner()))
}
