"""Images of one host: conversion of references, archives and folders to layers."""
