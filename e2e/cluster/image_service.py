"""The CRI's image service: images are names in the catalogue, and pulling one only looks it up."""
# ruff: noqa: N802  the protocol's names

import time
from pathlib import Path

import cri_pb2 as api
import cri_pb2_grpc as rpc
import grpc

from e2e.cluster.catalogue import Catalogue, Image


class ImageService(rpc.ImageServiceServicer):
    """Implements the CRI's ImageService."""

    def __init__(self, catalogue: Catalogue, root: Path) -> None:
        self.catalogue, self.root = catalogue, root

    def ListImages(self, request, context):
        return api.ListImagesResponse(images=[describe(image) for image in self.catalogue.images])

    def ImageStatus(self, request, context):
        image = self.catalogue.find(request.image.image)
        return api.ImageStatusResponse(image=image and describe(image))

    def PullImage(self, request, context):
        return api.PullImageResponse(image_ref=find(self.catalogue, request.image.image, context).id)

    def RemoveImage(self, request, context):
        return api.RemoveImageResponse()

    def ImageFsInfo(self, request, context):
        one = api.UInt64Value(value=1)
        where = api.FilesystemIdentifier(mountpoint=str(self.root))
        usage = api.FilesystemUsage(timestamp=time.time_ns(), fs_id=where, used_bytes=one, inodes_used=one)
        return api.ImageFsInfoResponse(image_filesystems=[usage], container_filesystems=[usage])


def find(catalogue: Catalogue, name: str, context: grpc.ServicerContext) -> Image:
    """The image by name or id; the call fails with NOT_FOUND when there is none."""
    image = catalogue.find(name)
    if image is None:
        context.abort(grpc.StatusCode.NOT_FOUND, f"image {name} is not in the catalogue (e2e/cluster/images.yaml)")
        raise AssertionError("abort raises")
    return image


def describe(image: Image) -> api.Image:
    """The image as a CRI message."""
    return api.Image(id=image.id, repo_tags=[image.name], size=1, uid=api.Int64Value(value=image.user))
