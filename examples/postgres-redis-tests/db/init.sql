-- Run once, as the superuser of the new cluster, in the database of POSTGRES_DB.
create table products (
    id serial primary key,
    name text not null unique,
    stock integer not null check (stock >= 0)
);

insert into products (name, stock) values ('anvil', 3), ('bellows', 1), ('tongs', 0);
