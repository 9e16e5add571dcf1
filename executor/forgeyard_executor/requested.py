"""From a job to the request that is carried out: the configuration's defaults, a lock's pins, the profile's rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from forgeyard_executor.config_apply import configured_job
from forgeyard_executor.image_pins import is_pinned, locked, with_digest
from forgeyard_executor.images import AS_USUAL, ImageOptions, ImageRequest, Images
from forgeyard_model.config import ExecutorConfig
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.identity import AttemptContext
from forgeyard_model.job import Job
from forgeyard_model.request import ExecutionRequest, PreparedWorkspace, request_from_job


@dataclass(frozen=True, slots=True)
class Requested:
    """A request, how it comes by its image, and what of it the configuration changed.

    :param lowered: profile defaults that the configured maximum cut down.
    :param asked: the job's image as written, before a lock pinned it; asked_services: those of services, by name.
    """

    request: ExecutionRequest
    options: ImageOptions = AS_USUAL
    lowered: Mapping[str, float | None] = field(default_factory=dict)
    asked: str = ""
    asked_services: Mapping[str, str] = field(default_factory=dict)

    @property
    def image(self) -> ImageRequest | None:
        """What the store is asked for; None on the host rootfs."""
        spec = self.request.spec
        if spec.image is None:
            return None
        return ImageRequest(spec.image, spec.platform, spec.user, self.asked, self.request.timeouts.prepare)

    @property
    def service_images(self) -> Mapping[str, ImageRequest]:
        """What the store is asked for services, by name."""
        seconds = self.request.timeouts.prepare
        return {
            item.name: ImageRequest(
                item.image,
                item.platform,
                item.user,
                self.asked_services.get(item.name, ""),
                seconds,
                f"services.{item.name}",
            )
            for item in self.request.spec.services
            if item.image is not None
        }


async def request_for(
    job: Job,
    context: AttemptContext,
    workspace: PreparedWorkspace,
    *,
    config: ExecutorConfig,
    images: Images,
    options: ImageOptions,
) -> Requested:
    """`job` under `config` and the lock of `options`.

    :raises InvalidRequest: for what the profile does not allow. Of a bare tag where a digest is due it says the digest,
        when the registry tells it soon.
    """
    asked, services = job.image, {item.name: item.image for item in job.services if item.image is not None}
    if options.lock is not None:
        job = await _locked(job, images, options)
    configured = configured_job(job, config)
    try:
        request = request_from_job(
            configured.job, context=context, workspace=workspace, caches_anywhere=config.caches.every_profile
        )
    except InvalidRequest as error:
        if error.field == "image" and asked is not None and not is_pinned(asked):
            raise await with_digest(images, error, asked, job.platform) from error
        for item in job.services:
            if item.image is not None and error.field.endswith(f"services.{item.name}.image"):
                raise await with_digest(images, error, item.image, item.platform) from error
        raise
    return Requested(request, options, configured.lowered, asked or "", services)


async def _locked(job: Job, images: Images, options: ImageOptions) -> Job:
    """`job` with every image of it pinned by the lock."""
    images_of = ((job.image, job.platform), *((item.image, item.platform) for item in job.services))
    wanted = [(image, platform) for image, platform in images_of if image is not None]
    if not wanted:
        return job
    pins = await locked(images, wanted, options, seconds=job.timeouts.prepare)
    services = tuple(
        item if item.image is None else replace(item, image=pins.get((item.image, item.platform), item.image))
        for item in job.services
    )
    image = None if job.image is None else pins.get((job.image, job.platform), job.image)
    return replace(job, image=image, services=services)
