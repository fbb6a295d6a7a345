"""The gateway: sessions of agents over engines, its routes, clients and clocks."""
