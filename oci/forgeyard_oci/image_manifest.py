"""Manifests, indexes and configs as they come from outside (OCI image spec 1.1; Docker image manifest 2, schema 2).

Unknown fields are ignored, as the specs ask; known ones are strict. Digests are always those of the bytes read.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from forgeyard_oci.image_errors import refused, unsupported

MAX_MANIFEST: Final = 4 << 20
"""Bytes. The distribution spec's own advice for manifests and indexes; configs are held to it as well."""

OCI_INDEX: Final = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
DOCKER_LIST: Final = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST: Final = "application/vnd.docker.distribution.manifest.v2+json"
INDEX_TYPES: Final = frozenset({OCI_INDEX, DOCKER_LIST})
MANIFEST_TYPES: Final = frozenset({OCI_MANIFEST, DOCKER_MANIFEST})
CONFIG_TYPES: Final = frozenset(
    {"application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json"}
)
ATTESTATION: Final = "vnd.docker.reference.type"


def _none_as_empty(value: object) -> object:
    # Go writes an absent list or map as null.
    return () if value is None else value


def _words(value: object) -> object:
    # Docker's own reader takes a bare string for a list of one.
    return (value,) if isinstance(value, str) else _none_as_empty(value)


Strings = Annotated[tuple[str, ...], BeforeValidator(_words)]
Text = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]


class _Foreign(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


class PlatformWords(_Foreign):
    """The platform of an index entry."""

    os: Text = ""
    architecture: Text = ""
    variant: Text = ""


class Descriptor(_Foreign):
    """A pointer to a blob: what it is, its digest and its size in bytes."""

    media_type: Text = Field(default="", alias="mediaType")
    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    size: int = Field(ge=0, lt=1 << 62, strict=True)
    platform: PlatformWords | None = None
    annotations: dict[str, str] | None = None

    def annotation(self, name: str) -> str:
        """One annotation, "" when absent."""
        return (self.annotations or {}).get(name, "")


Descriptors = Annotated[tuple[Descriptor, ...], BeforeValidator(_none_as_empty)]


class Index(_Foreign):
    """A list of manifests, usually one for each platform."""

    media_type: Text = Field(default="", alias="mediaType")
    manifests: Descriptors = ()


class Manifest(_Foreign):
    """One image: its config and its layers, lowest first."""

    media_type: Text = Field(default="", alias="mediaType")
    config: Descriptor
    layers: Descriptors = ()


class _Kind(_Foreign):
    schema_version: int | None = Field(default=None, alias="schemaVersion")
    media_type: Text = Field(default="", alias="mediaType")
    manifests: object = None
    config: object = None


def _absent_as_empty(value: object) -> object:
    # Go writes an absent map as null, and a set as a map whose values say nothing.
    return {} if value is None else value


class HealthWords(_Foreign):
    """Docker's Healthcheck. Times in nanoseconds; 0 and absent mean the default."""

    test: Strings = Field(default=(), alias="Test")
    interval: int | None = Field(default=None, alias="Interval", strict=True)
    timeout: int | None = Field(default=None, alias="Timeout", strict=True)
    start_period: int | None = Field(default=None, alias="StartPeriod", strict=True)
    retries: int | None = Field(default=None, alias="Retries", strict=True)


Names = Annotated[dict[str, object], BeforeValidator(_absent_as_empty)]


class ExecutionConfig(_Foreign):
    """How a container of the image is run."""

    user: Text = Field(default="", alias="User")
    env: Strings = Field(default=(), alias="Env")
    entrypoint: Strings = Field(default=(), alias="Entrypoint")
    cmd: Strings = Field(default=(), alias="Cmd")
    working_dir: Text = Field(default="", alias="WorkingDir")
    stop_signal: Text = Field(default="", alias="StopSignal")
    volumes: Names = Field(default_factory=dict, alias="Volumes")
    exposed_ports: Names = Field(default_factory=dict, alias="ExposedPorts")
    healthcheck: HealthWords | None = Field(default=None, alias="Healthcheck")
    shell: Strings = Field(default=(), alias="Shell")


class RootfsWords(_Foreign):
    """The layers' digests once uncompressed, lowest first."""

    diff_ids: Annotated[tuple[str, ...], BeforeValidator(_none_as_empty)] = ()


class ConfigFile(PlatformWords):
    """An image's config blob."""

    config: ExecutionConfig | None = None
    rootfs: RootfsWords = RootfsWords()


_Model = TypeVar("_Model", bound=BaseModel)


def parse_json(model: type[_Model], data: bytes, what: str) -> _Model:
    """Read bytes from outside as `model`.

    :raises SandboxError: names `what` and the first field that is wrong.
    """
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(word) for word in first["loc"])
        raise refused(
            "bad_manifest", f"{what} can't be read", details=f"{where}: {first['msg']}".lstrip(": ")
        ) from error


def parse_manifest(data: bytes, declared: str, digest: str) -> Index | Manifest:
    """Read an index or a manifest. `declared`: the media type of whoever pointed here, "" when nobody said.

    The body's own type wins over a sloppy pointer, unless the two contradict each other.

    :raises ExecutorError: UNSUPPORTED, for schema 1 and other kinds of manifest.
    :raises SandboxError: for one that can't be read or contradicts its pointer.
    """
    what = f"manifest {digest}"
    kind = parse_json(_Kind, data, what)
    media_type = _media_type(kind, declared, what)
    if kind.schema_version == 1 or "distribution.manifest.v1" in media_type:
        media_type = media_type or "schema 1"
        raise unsupported("manifest_type", f"unsupported manifest: {media_type}", resolution="rebuild the image")
    if media_type in INDEX_TYPES:
        return parse_json(Index, data, what)
    if media_type in MANIFEST_TYPES:
        return parse_json(Manifest, data, what)
    raise unsupported("manifest_type", f"unsupported manifest: {media_type or 'no media type'}", details=digest)


def _media_type(kind: _Kind, declared: str, what: str) -> str:
    shape = OCI_INDEX if kind.manifests is not None else OCI_MANIFEST if kind.config is not None else ""
    if kind.manifests is not None and kind.config is not None:
        raise refused("bad_manifest", f"{what} is an index and an image at once")
    known = INDEX_TYPES | MANIFEST_TYPES
    said = kind.media_type or (declared if declared in known else shape or declared)
    for other in (declared, shape):
        if said in known and other in known and (said in INDEX_TYPES) != (other in INDEX_TYPES):
            raise refused("bad_manifest", f"{what} contradicts itself", details=f"{said} but {other}")
    return said
