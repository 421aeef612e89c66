//! The journal files of a shard at start-up: making them, opening them, reading their headers.

use super::{Files, RecoverError, check_owner, journal_dir};
use crate::canary::Canary;
use crate::config::StoreConfig;
use crate::io::buf::AppendBuf;
use crate::io::{DiskOp, Done, FileClass, FileId, OpenHow};
use crate::journal::{FILE_HEADER_BYTES, FileHeader, FrameHeader, JournalError};
use crate::limits::BLOCK;
use crate::types::Lsn;

/// Bytes of one zeroing write.
const ZERO_PIECE: u64 = 1 << 20;
/// Zeroing writes that run together.
const ZERO_DEPTH: usize = 8;

/// One journal file as it was found.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    pub(crate) path: String,
    pub(crate) file: FileId,
    /// Its header, when it has one.
    pub(crate) header: Option<FileHeader>,
    /// The header was damaged and is told from the frames behind it.
    pub(crate) rebuilt: Option<Rebuilt>,
}

/// What the frames of a file cannot tell of its header.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rebuilt {
    /// Address of the last frame in the file before, when the first frame here is good.
    pub(crate) prev_lsn: Option<Lsn>,
}

/// The ring as it was found.
#[derive(Debug, Clone)]
pub(crate) struct Ring {
    pub(crate) files: Vec<Found>,
    /// The files were made by this start.
    pub(crate) fresh: bool,
}

impl Ring {
    /// Index of the file whose frames begin at `first`. After a cut a file of the life before may still claim the same
    /// address; the later life of a file has the higher incarnation.
    pub(crate) fn starting_at(&self, first: Lsn) -> Option<usize> {
        self.headers()
            .filter(|(_, h)| h.first_lsn == first)
            .max_by_key(|(_, h)| h.incarnation)
            .map(|(index, _)| index)
    }

    fn headers(&self) -> impl Iterator<Item = (usize, FileHeader)> {
        self.files
            .iter()
            .enumerate()
            .filter_map(|(index, found)| Some((index, found.header?)))
    }

    /// Files with their headers, without those whose address was taken over by a later life.
    pub(crate) fn current(&self) -> impl Iterator<Item = (usize, FileHeader)> {
        self.headers()
            .filter(|(index, h)| self.starting_at(h.first_lsn) == Some(*index))
    }

    /// Highest incarnation of any header.
    pub(crate) fn max_incarnation(&self) -> u64 {
        self.files
            .iter()
            .filter_map(|f| f.header)
            .map(|h| h.incarnation)
            .max()
            .unwrap_or(0)
    }
}

/// Opens the ring of `cfg`'s shard, making what is missing. The settings that the files fix are taken from them.
pub(super) fn open(
    files: &mut Files<'_>,
    cfg: StoreConfig,
    grain: usize,
) -> Result<(StoreConfig, Ring), RecoverError> {
    let dir = journal_dir(cfg.generation, cfg.shard.0);
    let names = existing(files, &dir)?;
    let (mut cfg, fresh) = (cfg, names.is_empty());
    if let Some((_, len)) = names.first() {
        cfg.journal_file_bytes = *len;
        cfg.journal_files = names.len();
    }
    cfg.check(grain)?;
    if fresh {
        for number in 0..cfg.journal_files {
            make_file(files, &dir, number, cfg.journal_file_bytes)?;
        }
        files.one(&dir, DiskOp::SyncDir { path: dir.clone() })?;
    }
    let mut ring = Ring {
        files: Vec::new(),
        fresh,
    };
    let names: Vec<String> = if fresh {
        (0..cfg.journal_files)
            .map(|number| format!("{number:03}"))
            .collect()
    } else {
        names.into_iter().map(|(name, _)| name).collect()
    };
    for name in names {
        ring.files
            .push(open_file(files, &cfg, grain, format!("{dir}/{name}"))?);
    }
    Ok((cfg, ring))
}

/// Journal files by name, with their length. An unfinished set is made anew: nothing was ever written to it.
fn existing(files: &mut Files<'_>, dir: &str) -> Result<Vec<(String, u64)>, RecoverError> {
    let Done::Listed(names) = files.one(dir, DiskOp::List { path: dir.to_owned() })? else {
        return Ok(Vec::new());
    };
    let journal = |name: &str| name.len() == 3 && name.bytes().all(|b| b.is_ascii_digit());
    let found: Vec<(String, u64)> = names
        .iter()
        .filter(|n| journal(&n.name) && !n.is_dir)
        .map(|n| (n.name.clone(), n.len))
        .collect();
    let finished = names.iter().any(|n| n.name.starts_with("checkpoint-"));
    Ok(if finished { found } else { Vec::new() })
}

/// Makes one file: temporary name, zeroed, synced, renamed.
fn make_file(files: &mut Files<'_>, dir: &str, number: usize, len: u64) -> Result<(), RecoverError> {
    let path = format!("{dir}/{number:03}");
    let temporary = format!("{path}.tmp");
    let how = OpenHow {
        class: FileClass::Checkpoint,
        create: true,
        write: true,
    };
    let Some((file, _)) = files.open(&temporary, how)? else {
        return Ok(());
    };
    files.one(&temporary, DiskOp::Resize { file, len: 0 })?;
    files.one(&temporary, DiskOp::Allocate { file, pos: 0, len })?;
    let mut zeros = AppendBuf::with_capacity(ZERO_PIECE as usize);
    zeros.append_zeros(ZERO_PIECE as usize);
    let zeros = zeros.freeze();
    let starts: Vec<u64> = (0..len.div_ceil(ZERO_PIECE)).map(|i| i * ZERO_PIECE).collect();
    for group in starts.chunks(ZERO_DEPTH) {
        let piece = |pos: &u64| {
            let bytes = zeros.slice(0..ZERO_PIECE.min(len - pos) as usize);
            DiskOp::Write {
                file,
                pos: *pos,
                bufs: vec![bytes],
            }
        };
        files.all(&temporary, group.iter().map(piece).collect())?;
    }
    files.one(&temporary, DiskOp::Sync { file })?;
    files.one(&temporary, DiskOp::Close { file })?;
    files.ops.free_file(file);
    files.one(
        &path,
        DiskOp::Rename {
            from: temporary,
            to: path.clone(),
        },
    )?;
    Ok(())
}

fn open_file(
    files: &mut Files<'_>,
    cfg: &StoreConfig,
    grain: usize,
    path: String,
) -> Result<Found, RecoverError> {
    let damaged = |what: String| RecoverError::Damaged {
        shard: cfg.shard.0,
        what,
    };
    let class = match cfg.has(Canary::AckBeforeSync) {
        true => FileClass::Segment,
        false => FileClass::Journal,
    };
    let how = OpenHow {
        class,
        create: false,
        write: true,
    };
    let Some((file, len)) = files.open(&path, how)? else {
        return Err(damaged(format!("{path} is missing")));
    };
    if len != cfg.journal_file_bytes {
        return Err(damaged(format!(
            "{path} has {len} bytes, the others {}",
            cfg.journal_file_bytes
        )));
    }
    // What a killed process wrote may be in the device's cache only; nothing is decided on it before it is durable.
    if !cfg.has(Canary::TrustedCache) {
        files.one(&path, DiskOp::Sync { file })?;
    }
    let block = files.read(&path, file, 0, BLOCK.max(FILE_HEADER_BYTES) as u64)?;
    let mut rebuilt = None;
    let header = match FileHeader::decode(&block) {
        Ok(header) => Some(header),
        Err(JournalError::Version(version)) => {
            return Err(damaged(format!(
                "{path} has format version {version}; this program writes another one"
            )));
        }
        Err(_) if block.iter().all(|byte| *byte == 0) => None,
        // Damage, or a header that a crash tore: what frames behind it say must not be lost with it. Without a frame
        // nothing was in the file.
        Err(error) => {
            tracing::warn!(%path, "damaged journal file header: {error}");
            let told = rebuild(files, cfg, grain, &path, file)?;
            rebuilt = told.map(|(_, rebuilt)| rebuilt);
            told.map(|(header, _)| header)
        }
    };
    if let Some(header) = &header {
        check_owner(cfg, &path, header.node, header.shard, header.generation)?;
        if header.grain as usize != grain && !(header.grain as usize).is_multiple_of(grain) {
            return Err(damaged(format!(
                "{path} has grain {}, the disk needs {grain}",
                header.grain
            )));
        }
    }
    Ok(Found {
        path,
        file,
        header,
        rebuilt,
    })
}

/// Tells a damaged header from the frames of the file's latest life.
fn rebuild(
    files: &mut Files<'_>,
    cfg: &StoreConfig,
    grain: usize,
    path: &str,
    file: FileId,
) -> Result<Option<(FileHeader, Rebuilt)>, RecoverError> {
    let bytes = files.read(path, file, 0, cfg.journal_file_bytes)?;
    let capacity = cfg.journal_file_bytes - grain as u64;
    let frames = (grain..bytes.len()).step_by(grain).filter_map(|pos| {
        let frame = FrameHeader::decode(&bytes[pos..], (bytes.len() - pos) as u64).ok()?;
        let first = frame.lsn.0.checked_sub((pos - grain) as u64)?;
        first.is_multiple_of(capacity).then_some((pos, Lsn(first), frame))
    });
    let Some((_, first_lsn, frame)) = frames.max_by_key(|(_, _, frame)| frame.incarnation) else {
        return Ok(None);
    };
    let header = FileHeader {
        node: cfg.node,
        generation: cfg.generation,
        shard: cfg.shard.0,
        incarnation: frame.incarnation,
        first_lsn,
        prev_end: first_lsn,
        checkpoint_lsn: Lsn(0),
        grain: grain as u32,
        file_bytes: cfg.journal_file_bytes,
    };
    let prev_lsn = FrameHeader::decode(&bytes[grain..], capacity)
        .ok()
        .filter(|first| first.incarnation == frame.incarnation)
        .map(|first| first.prev_lsn);
    Ok(Some((header, Rebuilt { prev_lsn })))
}
